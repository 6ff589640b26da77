#!/usr/bin/env bash
# Checks the models: without a switch the whole search has to find nothing, and with each it has to find an error.
#
#   model/run.sh          what CI runs
#   model/run.sh all      larger instances, and switches that are known to break nothing, too: some minutes
#   model/run.sh traces   writes the counterexamples to model/traces, too
#
# It needs spin and a C compiler, and at most 3 GB. JOBS (2) is how many searches run at a time.
set -euo pipefail
cd "$(dirname "$0")"
mode=${1:-}
jobs=${JOBS:-2}
for tool in spin "${CC:=cc}"; do
  command -v "$tool" > /dev/null || { echo "$tool is missing; on Debian: apt-get install spin gcc"; exit 1; }
done
export CC
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cp ./*.pml "$dir"

# Model, switch or "-", instance, and what is expected. README.md explains the instances.
small="-DTOKENS_A=1"
votes="$small -DFENCES=0 -DRENEWS=0"
rounds="$small -DFENCES=0"
fences="$small -DRENEWS=0 -DTTL=2 -DUNEVEN=1"
left="-DTOKENS_A=1 -DTOKENS_B=0 -DLEFT=1 -DFENCES=0"
list() {
  cat << END
redlock|-|$rounds|nothing
redlock|-|$fences|nothing
lock|-|$small|nothing
lock|-|-DWRITES=0 -DEXTENDS=0|nothing
lock|-|$small -DTTL=4 -DSENDS=1|nothing
lock|-|$small -DCOPIES=1 -DWRITES=0 -DEXTENDS=0|nothing
redlock|-|$left|nothing
END
  for s in NO_DRIFT FROM_REPLY FORGETS_KEY FORGETS_COUNTER PLAIN_DEL TOKEN_REUSED OWN_NOT_RAISED SHORTENS \
    GRANT_AFTER_DEADLINE HANDOFF_LEAVES_OLD HANDOFF_KEEPS_FENCE HANDOFF_AFTER_DEADLINE \
    FENCE_BEFORE_SET FENCE_AFTER_SET NO_FENCE_CHECK; do
    echo "lock|$s|$small|error"
  done
  cat << END
redlock|NO_DRIFT|$votes|error
redlock|FORGETS_KEY|$votes|error
redlock|QUORUM_LESS|$votes|error
redlock|FORGETS_COUNTER|$small -DRENEWS=0 -DTTL=2|error
redlock|BACK_WITHOUT_TOKEN|$fences|error
redlock|BACK_WITHOUT_BOTH|$fences -DLOWER=1|error
redlock|COUNTS_INSTALLS|$rounds|error
redlock|INSTALLS_OVER_OTHERS|$rounds|error
redlock|DELETES_BEFORE_ACQUIRES|$left|error
redlock|DELETES_BEFORE_INSTALLS|$left|error
END
  [ "$mode" != all ] || cat << END
lock|-|-DCOPIES=1 -DWRITES=0 -DEXTENDS=0|nothing
redlock|COUNTS_WHEN_INSTALLED|$rounds|nothing
redlock|BACK_WITHOUT_MAX|$fences|nothing
END
}

# one makes the search of a line. The whole state space is searched depth first; for an error, breadth first, which
# finds a shortest one.
one() {
  IFS='|' read -r model switch instance expected <<< "$2"
  d=$dir/$1
  mkdir "$d"
  cp "$dir/$model.pml" "$d"
  cd "$d"
  flags=$instance
  [ "$switch" = - ] || flags="$flags -D$switch"
  how="-O2"
  [ "$expected" = nothing ] || how="-O1 -DBFS"
  # shellcheck disable=SC2086 # flags are several words
  spin -a $flags "$model.pml" > spin.out 2>&1 && "$CC" -w $how -DSAFETY -DMEMLIM=3000 -o pan pan.c > cc.out 2>&1 \
    && timeout 600 ./pan -m1000000 -w23 > pan.out 2>&1 || true
  touch pan.out
  if grep -q 'assertion violated' pan.out && [ -s "$model.pml.trail" ]; then
    found=error
  elif grep -q 'errors: 0' pan.out && ! grep -qE 'not completed|too small|out of memory|MEMLIM' pan.out; then
    found=nothing
  else
    found='no result'
  fi
  result="$found, as expected"
  [ "$found" = "$expected" ] || result="FAILED: $found instead of $expected"
  states=$(awk '/states, stored/ {print $1}' pan.out)
  depth=$(sed -n 's/.*depth reached \([0-9]*\).*/\1/p' pan.out | tail -1)
  seconds=$(sed -n 's/.*elapsed time \([0-9.]*\).*/\1/p' pan.out)
  printf '%-8s %-24s %-42s %9s %6s %6s  %s\n' "$model" "$switch" "${instance//-D/}" "$states" "$depth" "$seconds" "$result" > row
  [ "$found" = "$expected" ] || tail -q -n 5 spin.out cc.out pan.out >> row
  [ "$found" != error ] || trace > trace.txt
  rm -f pan
}

# trace is the counterexample that was found, and the invariant it breaks: the comment at the assertion.
trace() {
  echo "# $model.pml with -D$switch, instance: ${instance//-D/}. Written by model/run.sh traces; the first column is the time."
  # shellcheck disable=SC2086
  spin -t -B -T -DTRACE $flags "$model.pml" > replay 2>&1 || true
  grep -E '^[0-9]+ ' replay
  line=$(sed -n "s/^spin: $model.pml:\([0-9]*\), Error: assertion violated.*/\1/p" replay | head -1)
  echo "violated: $(sed -n "${line}s/.*\/\* \(.*\) \*\/.*/\1/p" "$model.pml")"
}

export -f one trace
export dir
began=$SECONDS
printf '%-8s %-24s %-42s %9s %6s %6s  %s\n' model switch instance states depth seconds result
list | awk '{print NR; print}' | xargs -d '\n' -n 2 -P "$jobs" bash -c 'set -euo pipefail; one "$@"' one
count=$(list | wc -l)
for ((i = 1; i <= count; i++)); do cat "$dir/$i/row"; done
if [ "$mode" = traces ]; then
  rm -rf traces
  mkdir traces
  for ((i = 1; i <= count; i++)); do
    IFS='|' read -r model switch _ <<< "$(list | sed -n "${i}p")"
    [ ! -e "$dir/$i/trace.txt" ] || cp "$dir/$i/trace.txt" "traces/$model-$switch.txt"
  done
fi
echo "$((SECONDS - began)) s"
! cat "$dir"/*/row | grep -q FAILED
