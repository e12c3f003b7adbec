#!/usr/bin/env bash
# Run all tests, or those that are named: bash run_tests.sh [test_numbers ...]. PYTHON=... chooses the interpreter.
# Where it cannot import torch, a virtual environment is made in .venv, and requirements.txt installed there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
python=${PYTHON:-python3}
command -v "$python" > /dev/null || {
  echo "run_tests.sh: no $python here: install Python 3.9 or newer, or set PYTHON" >&2
  exit 2
}

if ! "$python" -c 'import torch' 2> /dev/null; then
  if ! .venv/bin/python -c 'import torch' 2> /dev/null; then
    "$python" -m venv .venv
    .venv/bin/python -m pip install -r requirements.txt
  fi
  python=.venv/bin/python
fi
exec "$python" -m tests "$@"
