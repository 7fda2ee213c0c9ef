"""The process that moves the bytes of one part: `python -m gms.transfer_child save|load|either`."""
