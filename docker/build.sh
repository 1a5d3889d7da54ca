#!/usr/bin/env bash
# Build an image with the versions of docker/versions.env:
#
#     docker/build.sh npu                                          # anygauge:npu for this machine
#     docker/build.sh npu --build-arg PRODUCT=a3                   # another version of one thing
#     docker/build.sh cuda                                         # anygauge:cuda
#     docker/build.sh npu --platform linux/arm64,linux/amd64       # both architectures, with docker buildx
#
# Further arguments go to `docker buildx build`. DOCKER names another command than docker.
set -euo pipefail
cd "$(dirname "$0")/.."

kind="${1:?which image: cpu, cuda or npu}"
shift
file="docker/Dockerfile.$kind"
[[ -f $file ]] || { echo "There is no $file." >&2; exit 1; }

arguments=()
while IFS= read -r line; do
  name="${line%%=*}"
  if grep -q "^ARG $name\$" "$file"; then
    arguments+=(--build-arg "$line")
  fi
done < <(grep -E '^[A-Z_]+=' docker/versions.env)

exec "${DOCKER:-docker}" buildx build --file "$file" "${arguments[@]}" --tag "anygauge:$kind" "$@" .
