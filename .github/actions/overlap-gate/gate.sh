#!/usr/bin/env bash
# Checks traces by `ddp-prof check`; writes its table and the summary's sentence and cause to the job summary, and to one
# comment on the pull request, which later runs replace. Exit code: that of `ddp-prof check`; 3: a requirement is not met.
#
# Settings (environment): TRACES, BASELINE, ARGUMENTS, READING, GH_TOKEN, PULL_REQUEST (see action.yml), and GitHub's own.
set -euo pipefail

marker="<!-- ddp-prof overlap gate -->"
report="$(mktemp)"
trap 'rm -f "$report"' EXIT

# lines TEXT: its lines that are not empty, as the array `found`; nothing in them is run or divided.
lines() {
  local line
  found=()
  while IFS= read -r line; do [ -z "$line" ] || found+=("$line"); done <<<"$1"
}

# files TEXT: what the patterns match; one that matches nothing stays, for ddp-prof to name it.
files() {
  local pattern path matched=()
  lines "$1"
  for pattern in ${found[@]+"${found[@]}"}; do
    while IFS= read -r path; do matched+=("$path"); done < <(compgen -G "$pattern" || echo "$pattern")
  done
  found=(${matched[@]+"${matched[@]}"})
}

# The sentence and the cause of each run. Names in them come from traces: as indented code they are no Markdown.
sentences() {
  ddp-prof summary -q --format json ${reading[@]+"${reading[@]}"} -- "${traces[@]}" | python3 -c '
import json, sys, textwrap
for run in json.load(sys.stdin)["runs"]:
    for title, text in (("run", run["label"]), ("gain", run["headline"]), ("cause", run["cause"]), ("advice", run["advice"])):
        if text:
            print(textwrap.fill(f"{title:7} {text}", 100, initial_indent=" " * 4, subsequent_indent=" " * 12))
    print()'
}

comment() {
  local comments="repos/$GITHUB_REPOSITORY/issues/$PULL_REQUEST/comments" last
  last="$(gh api --paginate "$comments" --jq ".[] | select(.body | startswith(\"$marker\")) | .id" | tail -1)" || return 1
  if [ -n "$last" ]; then
    gh api -X PATCH "repos/$GITHUB_REPOSITORY/issues/comments/$last" -F "body=@$report" >/dev/null
  else
    gh api -X POST "$comments" -F "body=@$report" >/dev/null
  fi
}

command -v ddp-prof >/dev/null || python3 -m pip install -q "$GITHUB_ACTION_PATH/../../.."
lines "${ARGUMENTS:-}" && arguments=(${found[@]+"${found[@]}"})
lines "${READING:-}" && reading=(${found[@]+"${found[@]}"})
files "${BASELINE:-}"
for path in ${found[@]+"${found[@]}"}; do arguments+=("--baseline=$path"); done
files "$TRACES" && traces=(${found[@]+"${found[@]}"})
[ "${#traces[@]}" -gt 0 ] || { echo "overlap gate: no traces are given: say inputs.traces" >&2 && exit 2; }

code=0
printf '%s\n\n' "$marker" >"$report"
ddp-prof check -q --format markdown ${arguments[@]+"${arguments[@]}"} ${reading[@]+"${reading[@]}"} -- "${traces[@]}" \
  >>"$report" 2>"$report.error" || code=$?
cat "$report.error" >&2
case "$code" in
  0 | 3) printf '\n' >>"$report" && { sentences >>"$report" || echo "No summary can be made of these traces." >>"$report"; } ;;
  *) printf '### ddp-prof check: could not decide\n\n%s\n' "$(sed 's/^/    /' "$report.error")" >>"$report" ;;
esac
rm -f "$report.error"
cat "$report" >>"${GITHUB_STEP_SUMMARY:-/dev/stdout}"
if [ -n "${GH_TOKEN:-}" ] && [ -n "${PULL_REQUEST:-}" ]; then
  # A token of a fork may not write: that says nothing about the traces.
  comment || echo "::warning::overlap gate: the comment could not be written; the job summary has the same"
fi
exit "$code"
