#!/usr/bin/env bash
# Set CANN's environment, that of its nnal package and that of SGLang's custom operators, and run the command.
set_up() {
  local file
  for file in "$@"; do
    # shellcheck disable=SC1090
    if [[ -f $file ]]; then source "$file"; fi
  done
}
set_up /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/cann/set_env.sh
set_up "${ASCEND_HOME_PATH:-}"/opp/vendors/{customize,custom_transformer}/bin/set_env.bash \
  /usr/local/Ascend/nnal/atb/set_env.sh
# the driver's libraries are the host's, mounted
export LD_LIBRARY_PATH="/usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64/driver:/usr/local/Ascend/driver/lib64/common:${LD_LIBRARY_PATH:-}"
exec "$@"
