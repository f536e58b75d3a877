#!/usr/bin/env bash
# Tests callbacks, tune and the monitor against Lightning, Hugging Face's Trainer, W&B, MLflow and TensorBoard themselves,
# in an environment of its own (.trainers) on top of .venv, which has torch. Takes some minutes.
#
#   scripts/dev/trainers.sh [arguments of pytest]
#
# Settings (environment): those of scripts/env.sh (VENV, PYTHON).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CHROMIUM=0 bash scripts/env.sh train dev
python="${VENV:-.venv}/bin/python"
if [[ ! -e .trainers/ready ]]; then
  "$python" -m venv --clear .trainers
  site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
  echo "import site; site.addsitedir('$(site "$python")')" > "$(site .trainers/bin/python)/with_torch.pth"
  .trainers/bin/python -m pip install --quiet lightning transformers accelerate wandb mlflow tensorboard
  touch .trainers/ready
fi
exec .trainers/bin/python -m pytest -q -m trainers "$@"
