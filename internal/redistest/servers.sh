#!/usr/bin/env bash
# Brings the servers that the tests run against, all of them from Debian's packages.
set -euo pipefail

usage() {
	cat <<'USAGE'
usage: servers.sh [fetch | start PORT | stop PORT]

  fetch       get what is missing of Redis 7.0 (installed by apt-get, which takes root), Redis 8.0 and Valkey 9.1
              (unpacked into the cache, without touching the system); the default
  start PORT  run a Redis 7 in the background, and print its URL
  stop PORT   end it

environment:
  LOCK_REDISTEST_DIR     the cache (default: ${XDG_CACHE_HOME:-$HOME/.cache}/lock-redistest)
  LOCK_REDISTEST_MIRROR  the Debian mirror to use (default: the one that this machine's apt uses)
USAGE
}

cache=${LOCK_REDISTEST_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/lock-redistest}

say() { printf 'servers.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# What the two servers need beside themselves: no machine's own libraries are trusted to be new enough.
libraries=(libc6 libjemalloc2 liblua5.1-0 libssl3t64 libsystemd0 libstdc++6 libgcc-s1 libatomic1 liblzf1 libcap2 libzstd1)

main() {
	case ${1:-fetch} in
	-h | --help | help) usage ;;
	fetch) fetch ;;
	start | stop)
		[[ ${2:-} =~ ^[0-9]+$ ]] || fail "not a port: '${2:-}'"
		"$1" "$2"
		;;
	*) usage >&2; exit 2 ;;
	esac
}

fetch() {
	fetch_redis7
	fetch_from_suite redis8 trixie redis-tools redis-check-rdb redis-server
	fetch_from_suite valkey9 sid valkey-tools valkey-check-rdb valkey-server
}

fetch_redis7() {
	local missing=()
	command -v redis-server >/dev/null || missing+=(redis-server)
	command -v redis-sentinel >/dev/null || missing+=(redis-sentinel)
	dpkg -s python3-redis >/dev/null 2>&1 || missing+=(python3-redis)
	((${#missing[@]})) || return 0
	((EUID == 0)) || fail "missing: ${missing[*]}; run this as root to install"
	say "installing ${missing[*]}"
	apt-get update -qq >&2
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

# fetch_from_suite NAME SUITE PACKAGE PROGRAM ALIAS unpacks PACKAGE, and makes $cache/NAME-server run its PROGRAM as ALIAS.
# The server is in the package of the tools: which of them the program is, it tells by the name that it is called by.
fetch_from_suite() {
	local name=$1 suite=$2 package=$3 program=$4 alias=$5 work loader
	[[ -x $cache/$name-server ]] && return
	say "fetching $name from $suite into $cache"
	mkdir -p "$cache"
	work=$(mktemp -d "$cache/$name.XXXXXX")
	# shellcheck disable=SC2064 # the folder of now
	trap "rm -rf '$work'" EXIT
	download "$work" "$suite" "$package" "${libraries[@]}"
	for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/root"; done
	loader=$(cd "$work/root" && find usr/lib -name 'ld-linux*.so.*' -path '*-linux-gnu*' | head -n 1)
	[[ $loader && -x $work/root/usr/bin/$program ]] || fail "$package of $suite is not what it was: no loader or no $program"
	rm -rf "${cache:?}/$name"
	mv "$work/root" "$cache/$name"
	write_wrapper "$cache/$name" "$loader" "$program" "$alias" >"$work/wrapper"
	chmod +x "$work/wrapper"
	"$work/wrapper" --version >&2
	mv "$work/wrapper" "$cache/$name-server" # the last step: what is there is whole
	rm -rf "$work"
	trap - EXIT
}

write_wrapper() {
	local root=$1 loader=$2 program=$3 alias=$4
	printf '#!/bin/sh\nexec "%s" --argv0 %s --library-path "%s" "%s" "$@"\n' \
		"$root/$loader" "$alias" "$root/${loader%/*}" "$root/usr/bin/$program"
}

# download WORK SUITE PACKAGE... gets packages with lists, cache and status of its own.
download() {
	local work=$1 suite=$2 from trust own
	shift 2
	from=$(mirror)
	trust=$(trust)
	mkdir -p "$work"/{lists/partial,cache/archives/partial,debs}
	: >"$work/status"
	echo "deb [$trust] $from $suite main" >"$work/sources.list"
	own=(
		-o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=-
		-o "Dir::State::Lists=$work/lists" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache"
		-o Acquire::Languages=none -o APT::Update::Error-Mode=any
	)
	((EUID == 0)) && own+=(-o APT::Sandbox::User=root) # the sandbox's user may not enter the cache
	apt-get -qq "${own[@]}" update >&2
	(cd "$work/debs" && apt-get -qq "${own[@]}" download "$@" >&2)
}

# mirror finds out which Debian mirror this machine uses.
mirror() {
	local found=${LOCK_REDISTEST_MIRROR:-}
	# shellcheck disable=SC2016 # apt expands it
	[[ $found ]] || found=$(apt-get indextargets --format '$(REPO_URI)' | grep -m 1 -E '/debian/?$' || true)
	[[ $found ]] || fail 'apt knows no Debian mirror here: name one in LOCK_REDISTEST_MIRROR'
	echo "$found"
}

# trust says by which keys packages are checked. Where the machine has none of Debian's they are not checked: a last
# resort, for servers that run in tests only.
trust() {
	local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
	[[ -r $keyring ]] || keyring=/usr/share/keyrings/debian-archive-keyring.pgp
	if [[ -r $keyring ]]; then
		echo "signed-by=$keyring"
	else
		say 'no keyring of Debian here (package debian-archive-keyring): signatures are not checked'
		echo 'trusted=yes'
	fi
}

start() {
	local dir=$cache/run/$1
	command -v redis-server >/dev/null || fail 'redis-server is missing: run servers.sh fetch'
	if redis-cli -p "$1" ping >/dev/null 2>&1; then fail "something answers on port $1 already"; fi
	mkdir -p "$dir"
	redis-server --port "$1" --bind 127.0.0.1 --save '' --appendonly no --dir "$dir" \
		--daemonize yes --pidfile "$dir/pid" --logfile "$dir/log" >/dev/null
	for _ in {1..100}; do
		if [[ $(redis-cli -p "$1" ping 2>/dev/null) == PONG ]]; then
			echo "redis://127.0.0.1:$1"
			return
		fi
		sleep 0.1
	done
	tail "$dir/log" >&2
	fail "no answer on port $1"
}

stop() {
	local dir=$cache/run/$1 pid
	[[ -r $dir/pid ]] || fail "nothing was started on port $1"
	pid=$(<"$dir/pid")
	if [[ $(ps -o args= -p "$pid" || true) == *redis-server*":$1"* ]]; then
		kill "$pid"
		for _ in {1..100}; do
			kill -0 "$pid" 2>/dev/null || break
			sleep 0.1
		done
	fi
	rm -rf "$dir"
}

main "$@"
