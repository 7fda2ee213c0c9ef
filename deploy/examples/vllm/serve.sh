# Serves the model of `make engines ENGINE=vllm` on HTTP_PORT, under snapback-run.
export PYTHONPATH=.engines-vllm
# It sends nothing, and its cache of keys and values has one GiB.
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1
exec snapback-run --ready "http://127.0.0.1:$HTTP_PORT/health" -- \
  python3 -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port "$HTTP_PORT" \
  --model .engines-vllm/model --served-model-name demo \
  --dtype float32 --max-model-len 512 --enforce-eager
