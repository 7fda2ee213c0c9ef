"""A likeness of SGLang 0.5.23: the names and signatures that `snapback_client.sglang` uses.

Each file stands where SGLang has it. `test_engine_likenesses.py` compares them with SGLang itself
where its files are.
"""
