# shellcheck shell=bash
# Sourced by the scripts: what they have in common.

# require_whole NAME LEAST MOST [VALUE]: a setting must be a whole number, where it is set; exits with 2 where it is none.
# Nothing may calculate with a setting before: of "x[$(command)]" bash runs the command, in any arithmetic.
require_whole() {
  local LC_ALL=C value="${4-${!1-}}"
  [ -n "$value" ] || return 0
  [[ "$value" =~ ^(0|[1-9][0-9]{0,8})$ ]] && [ "$value" -ge "$2" ] && [ "$value" -le "$3" ] && return 0
  printf '%s: %s=%q: no whole number from %s to %s\n' "$(basename "$0" .sh)" "$1" "${value:0:80}" "$2" "$3" >&2
  exit 2
}

# on_exit FUNCTION: called with the exit code however this script ends, but for SIGKILL. A signal that comes meanwhile is
# ignored by it and by what it starts: Ctrl-C and the end of a session reach all processes at once, and twice.
on_exit() {
  # shellcheck disable=SC2064  # the function is the one named now
  trap "at_exit=\$?; trap '' INT TERM HUP; $1 \$at_exit" EXIT
  trap 'trap "" INT TERM HUP; exit 130' INT
  trap 'trap "" INT TERM HUP; exit 143' TERM HUP
}

# make_scratch NAME: makes a temporary folder, which `scratch` then names; it is locked as long as this script lives, and
# those that are not are of scripts that were killed, and go.
make_scratch() {
  local old prefix="${TMPDIR:-/tmp}/ddp_prof.$1"
  for old in "$prefix".*; do
    [ ! -O "$old" ] || flock -n "$old" rm -rf "$old" || true
  done
  until
    scratch="$(mktemp -d "$prefix.XXXXXX")" || exit 1
    exec 8<"$scratch"
    flock 8
    [ -d "$scratch" ] # another one may have found it before it was locked
  do :; done
}
