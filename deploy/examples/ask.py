"""Ask the worker of `worker.py` in this container something, and print its answer: `ask.py WORDS`.

With `--chat` it remembers what was said.
"""

import json
import os
import socket
import sys

*options, words = sys.argv[1:] or [""]
request = {"op": "chat", "text": words} if "--chat" in options else {"op": "ask", "prompt": words}
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(os.environ["POD_SOCKET_DIR"] + "/worker.sock")
    connection.sendall(json.dumps(request).encode() + b"\n")
    print(connection.makefile().readline(), end="")
