#!/bin/sh
# Installs what reads results, into the interpreter called `python`: neither torch nor a browser,
# which are most of the download.
set -eu
python - > "$RUNNER_TEMP/requirements.txt" <<'PY'
import tomllib
heavy = ("altair", "nvidia-ml-py", "safetensors", "streamlit", "torch", "triton", "vl-convert")
with open("pyproject.toml", "rb") as file:
    needed = tomllib.load(file)["project"]["dependencies"]
print("\n".join(line for line in needed if not line.startswith(heavy)))
PY
python -m pip install --quiet --requirement "$RUNNER_TEMP/requirements.txt"
python -m pip install --quiet --no-deps .
