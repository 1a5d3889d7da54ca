#!/bin/bash
# Submit a run to a Ray cluster that is there, and follow its log until it ends:
#
#     examples/clusters/ray_job.sh http://HEAD:8265 CONFIG.toml [--section.key value ...]
#
# The paths are those of the head. Ray's job server is part of `ray[default]`. If the cluster asks for a token, set
# RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH here too. `ray job stop ID` ends the run in order.
set -euo pipefail

address=$1
config=$2
shift 2
exec ray job submit --address "$address" -- anygauge train "$config" "$@" --cluster.address auto
