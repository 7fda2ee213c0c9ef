"""A likeness of vLLM 0.33.0: the names and signatures that `snapback_client.vllm` uses.

Each file stands where vLLM has it. `test_engine_likenesses.py` compares them with vLLM itself
where its files are.
"""
