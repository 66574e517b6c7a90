#!/usr/bin/env bash
# Load a server with real-time requests over best-effort ones, and see what its users would have.
#
#     . .venv-clients/bin/activate       # made by `make bench-client`; or pip install -e '.[bench]'
#     examples/load_test.sh
#     examples/load_test.sh --duration-s 60 --rate 8 --plot over_time.png
#
# Real-time requests arrive by chance, 4 per second on average, whatever has become of the ones
# before; their targets are sent along, so that the server plans by what is judged here. Beside them
# four clients send best-effort requests one after the other. The table at the end has a column per
# class; load_test.json has all figures.
#
# LIGHTSERVE_URL names another server than the one on this machine, OPENAI_API_KEY its key.
set -euo pipefail

export LOAD_TEST_API_KEY="${OPENAI_API_KEY:-}"
lightserve bench --url "${LIGHTSERVE_URL:-http://127.0.0.1:8000}" \
    --rate 4 --duration-s 10 --prompt-tokens 64:256 --output-tokens 32:64 \
    --targets ttft=500ms,tpot=100ms,mtpot=500ms --send-targets \
    --be "concurrency=4 prompt-tokens=256:512 output-tokens=32:128" \
    --output load_test.json "$@"
