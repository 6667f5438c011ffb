#!/usr/bin/env bash
# Plans MODEL with FLAGS, and fails with annotations if the plan takes more than LIMIT. With BASELINE, an older plan, the difference from it
# is an annotation, too. The plan is written to PLAN.
set -euo pipefail

# FLAGS has several words.
# shellcheck disable=SC2086
plimsoll plan "$MODEL" ${FLAGS:-} --save "$PLAN" ${LIMIT:+--assert-bytes "$LIMIT"} --format github
if [ -n "${BASELINE:-}" ]; then
  plimsoll diff "$BASELINE" "$PLAN" --format github
fi
