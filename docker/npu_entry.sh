#!/usr/bin/env bash
# Set CANN's environment, and that of its nnal package, and run the command.
for file in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/cann/set_env.sh \
    /usr/local/Ascend/nnal/atb/set_env.sh; do
  # shellcheck disable=SC1090
  if [[ -f $file ]]; then source "$file"; fi
done
# the driver's libraries are the host's, mounted
export LD_LIBRARY_PATH="/usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64/driver:/usr/local/Ascend/driver/lib64/common:${LD_LIBRARY_PATH:-}"
exec "$@"
