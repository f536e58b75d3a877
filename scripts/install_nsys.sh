#!/usr/bin/env bash
# Fetches the Nsight Systems command line (nsys) into a private folder and prints its path on stdout, all messages on
# stderr. scripts/profile_variant.sh and profile_all.sh call this if they find no nsys.
#
#   scripts/install_nsys.sh
#   scripts/install_nsys.sh --pack F  # makes an archive of it (35 MB) for NSYS_ARCHIVE on a machine without network,
#                                     # and F.sha256
#
# It uses the distribution's packages (Debian: non-free, Ubuntu: multiverse): about 180 MB to download, 0.6 GB unpacked.
# It needs no root, and changes neither the system's apt configuration nor its packages.
#
# Settings (environment):
#   NSYS_PREFIX      the private folder                                     (default: .nsys in the checkout)
#   NSYS_FETCH       0: fetch nothing                                       (default: 1)
#   NSYS_RELEASE     the distribution's release to fetch it from, such as experimental, which has Debian's newest; its
#                    libraries come from the system's release               (default: the system's; on Ubuntu 22.04 noble,
#                    as its own nsys, 2021.3, writes no .nsys-rep files)
#   NSYS_ARCHIVE     a file made by --pack, with its checksum (FILE.sha256): it is unpacked, and nothing fetched
#   OS_RELEASE       the file that names the distribution                   (default: /etc/os-release)
#
# Exit: 0 and the path, or 1 and one line with the reason.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
prefix="${NSYS_PREFIX:-$root/.nsys}"
release="${NSYS_RELEASE:-}"
work=""

say() { echo "install_nsys: $*" >&2; }

fail() {
  say "$*"
  exit 1
}

by_hand="install Nsight Systems from developer.nvidia.com/nsight-systems and set NSYS=/path/to/nsys, or use PROFILER=kineto"

stop_tree() {
  local child
  while read -r -d ' ' child; do stop_tree "$child"; done < <(cat "/proc/$1/task"/*/children 2>/dev/null)
  [ "$1" = "$$" ] || kill "$1" 2>/dev/null || true
}

clean_up() {
  trap '' INT TERM HUP
  stop_tree "$$"
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

usable() { [ -x "$1" ] && "$1" --version >/dev/null 2>&1; }

require_distribution() {
  local tool os_release="${OS_RELEASE:-/etc/os-release}"
  for tool in apt-get apt-cache dpkg dpkg-deb flock; do
    command -v "$tool" >/dev/null || fail "without $tool there are no packages to fetch: $by_hand"
  done
  [ -r "$os_release" ] || fail "$os_release does not say which system this is: $by_hand"
  # shellcheck disable=SC1090
  read -r distribution codename < <(. "$os_release" && echo "${ID:-unknown} ${UBUNTU_CODENAME:-${VERSION_CODENAME:-}}")
  case "$distribution" in
    debian) components="main contrib non-free" keyrings="debian-archive-keyring" ;;
    *) components="main restricted universe multiverse" keyrings="ubuntu-archive-keyring" ;;
  esac
  [ "$codename" != jammy ] || release="${release:-noble}"
  from="${release:+/$release}" # as apt names a package of a release
  architecture="$(dpkg --print-architecture)"
  case "$architecture" in
    amd64 | arm64) ;;
    *) fail "there are no packages of nsys for $architecture: $by_hand" ;;
  esac
}

# Writes the repositories of this system, with the components that contain nsys. It uses the system's suite, not a newer
# one, so that libraries come from the same place and the system has the keys.
write_sources() {
  local keyring options=""
  for keyring in "/usr/share/keyrings/$keyrings".{pgp,gpg}; do
    [ ! -r "$keyring" ] || options="[signed-by=$keyring] "
  done
  apt-get indextargets --format "\$(REPO_URI) \$(RELEASE) \$(COMPONENT)" "Created-By: Packages" |
    grep -E " ($codename|stable|oldstable|testing|unstable|sid)(-updates|-security)? main$" | sort -u |
    while read -r uri suite _; do
      echo "deb $options$uri $suite $components"
      if [ -n "$release" ] && [ "$suite" = "$codename" ]; then echo "deb $options$uri $release $components"; fi
    done >"$work/sources.list" || true
  [ -s "$work/sources.list" ] ||
    fail "apt has no repository of $distribution ${codename:-(unknown release)} configured: $by_hand"
}

# Runs apt with lists, cache and sources in the private folder; those of the system are not changed. Its complaints are read
# here, so they must not be translated.
private() {
  local tool="$1"
  local -x LC_ALL=C.UTF-8 LANGUAGE=
  shift
  timeout "${limit_s:-0}" "$tool" -qq -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o Dir::Cache::archives="$downloads" \
    -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- -o Debug::NoLocking=1 \
    -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::Retries=2 -o Acquire::http::Timeout=30 "$@"
}

# The first error or warning of apt, shortened.
complaint() { { grep -m1 -E '^[EW]:' "$work/log" || tail -1 "$work/log"; } | cut -c1-160; }

# A network that drops all packets keeps apt waiting for minutes, for each repository. A slow one brings something.
update_lists() {
  local status=0
  mkdir -p "$work/lists/partial" "$work/cache" "$downloads/partial"
  limit_s=60 private apt-get update >"$work/log" 2>&1 || status=$?
  if [ "$status" = 124 ]; then
    find "$work/lists" -type f -size +0 | grep . >/dev/null ||
      fail "nsys cannot be fetched, no repository answered within 60 s: connect, or $by_hand"
    say "the network is slow, going on"
    private apt-get update >"$work/log" 2>&1 || true
  fi
  if ! private apt-cache show "nsight-systems$from" 2>/dev/null | grep '^Version:' >/dev/null; then
    if grep -qiE 'resolving|connect|unreachable|timed out|failed to fetch' "$work/log"; then
      fail "nsys cannot be fetched, apt reaches no repository ($(complaint)): connect, or $by_hand"
    fi
    fail "$distribution ${release:-$codename} has no package nsight-systems for $architecture: $by_hand"
  fi
}

# Deletes what a run before has downloaded, but the files whose names come on stdin: packages of two versions do not fit.
keep_downloads() {
  local wanted package
  wanted="$(cat)"
  for package in "$downloads"/*.deb; do
    grep -qxF "${package##*/}" <<<"$wanted" || rm -f "$package"
  done
}

# nsys declares dependencies on the CUDA driver, which is not needed without a GPU, and on libraries of its viewer. So
# only its own packages are fetched (and dependencies of the same version), then the few libraries that its importer
# loads, if missing.
download() {
  local described packages
  mapfile -t packages < <(private apt-cache show --no-all-versions "nsight-systems$from" | sed -n 's/^Depends: //p' |
    tr ',' '\n' | sed -nE "s|^ *(lib[a-z0-9-]+) \(= .*|\1$from|p")
  packages+=("nsight-systems$from" "nsight-systems-target$from")
  described="$(private apt-cache show --no-all-versions "${packages[@]}" |
    awk '/^Version:/ { version = $2 } /^Size:/ { size += $2 } END { printf "%s (%.0f MB)", version, size / 1e6 }')"
  say "fetching Nsight Systems $described from $distribution ${release:-$codename}"
  keep_downloads < <(private apt-get download --print-uris "${packages[@]}" | cut -d' ' -f2)
  (cd "$downloads" && private apt-get download "${packages[@]}" && rm -rf ./*.FAILED) >"$work/log" 2>&1 ||
    fail "the download broke off ($(complaint)): run it again, it goes on where it stopped"
  private apt-get install --download-only -y --no-install-recommends libssh-4 libpfm4 libelf1 >"$work/log" 2>&1 ||
    fail "the libraries of nsys cannot be fetched ($(complaint)): apt-get install libssh-4 libpfm4 libelf1"
}

# Debian puts nsys into two folders joined by links, where nsys does not find its importer; in one folder it does.
lay_out() {
  local package job jobs=()
  say "unpacking"
  for package in "$downloads"/nsight-systems*.deb; do
    (dpkg-deb --fsys-tarfile "$package" | tar -x -C "$work/unpacked" --exclude './usr/share/*') 2>"$work/log" &
    jobs+=("$!")
  done
  for job in "${jobs[@]}"; do
    wait "$job" || { rm -rf "$downloads" && fail "what was downloaded is broken ($(head -1 "$work/log")): run it again"; }
  done
  mkdir -p "$work/nsight-systems" "$work/libraries"
  find "$work/unpacked" -type d \( -name 'host-linux-*' -o -name 'target-linux-*' \) -prune \
    -exec mv -t "$work/nsight-systems" {} +
  host="$(compgen -G "$work/nsight-systems/host-linux-*" || true)"
  target="$(compgen -G "$work/nsight-systems/target-linux-*" || true)"
  if [ -z "$host" ] || [ -z "$target" ]; then
    fail "the packages of $distribution $codename have an unknown layout: $by_hand"
  fi
  for package in "$downloads"/lib*.deb; do
    [ ! -e "$package" ] || dpkg-deb --fsys-tarfile "$package" | tar -x -C "$work/libraries"
  done
  find "$work/libraries" -name 'lib*.so*' -exec cp -P -t "$host" {} + -exec cp -P -t "$target" {} +
  # apt downloads none that is installed here already; on the machine that unpacks an archive of this it may be missing.
  for library in libssh.so.4 libpfm.so.4 libelf.so.1; do
    installed="$(/sbin/ldconfig -p | sed -n "s/.*${library//./\\.} .*=> //p" | head -1)"
    for folder in "$host" "$target"; do
      [ -e "$folder/$library" ] || [ -z "$installed" ] || ln -sf "$installed" "$folder/$library"
    done
  done
  ln -sf libssh.so.4 "$host/libssh.so"
}

# Records a program, imports and exports it, which is all that a capture needs. An agent that nsys leaves is ended: it is
# no descendant of this shell any more, and is found by its TMPDIR.
records() {
  local nsys="$1" status=0 environment
  (cd "$work" && export TMPDIR="$work" && rm -f check.* &&
    timeout -k 10 120 "$nsys" profile --trace=nvtx --sample=none --cpuctxsw=none -o check true &&
    timeout -k 10 120 "$nsys" export --type sqlite -o check.sqlite check.nsys-rep && [ -s check.sqlite ]) >"$work/log" 2>&1 || status=$?
  for environment in /proc/[0-9]*/environ; do
    ! grep -qzxF "TMPDIR=$work" "$environment" 2>/dev/null || kill "$(basename "${environment%/environ}")" 2>/dev/null || true
  done
  return "$status"
}

# nsys 2022.4 loses a race with its own agent on a busy machine (LOST_RACE in ddp_prof/capture/variant.py), and says so
# in many ways; only what the loader complains about, or what is not found, will not change.
check() {
  local attempt reason=""
  for attempt in {1..8}; do
    ! records "$1" || return 0
    reason="$(tr '\r' '\n' <"$work/log" | { grep -m1 -iE 'cannot open shared|symbol lookup|not found' || true; } | cut -c1-200)"
    [ -z "$reason" ] || break
    sleep 1
  done
  [ -n "$reason" ] || reason="$attempt times; $(grep . "$work/log" | tail -1 | cut -c1-200)"
  fail "nsys is unpacked but does not record here ($reason): $by_hand"
}

# Downloads it and lays it out in $work/nsight-systems.
fetch() {
  downloads="$prefix/downloads"
  mkdir "$work/unpacked"
  write_sources
  update_lists
  download
  lay_out
}

digest() { sha256sum "$1" | cut -d' ' -f1; }

# Unpacks an archive of --pack into $work/nsight-systems, if its checksum is right.
unpack() {
  [ -r "$NSYS_ARCHIVE.sha256" ] ||
    fail "NSYS_ARCHIVE=$NSYS_ARCHIVE has no checksum beside it: copy $NSYS_ARCHIVE.sha256, too, which --pack writes"
  [ "$(digest "$NSYS_ARCHIVE")" = "$(cut -d' ' -f1 "$NSYS_ARCHIVE.sha256")" ] ||
    fail "NSYS_ARCHIVE=$NSYS_ARCHIVE does not have the checksum in $NSYS_ARCHIVE.sha256: copy both again"
  tar -xaf "$NSYS_ARCHIVE" -C "$work" 2>"$work/log" || fail "NSYS_ARCHIVE=$NSYS_ARCHIVE cannot be unpacked ($(head -1 "$work/log"))"
  target="$(compgen -G "$work/nsight-systems/target-linux-*")" || fail "NSYS_ARCHIVE=$NSYS_ARCHIVE holds no nsys: make it with --pack"
}

# install fetch|unpack: makes nsys, checks that it records, and puts it into the private folder; one run at a time.
install() {
  [ "$1" != fetch ] || require_distribution
  mkdir -p "$prefix" 2>/dev/null || true
  [ -w "$prefix" ] || fail "cannot write to $prefix: set NSYS_PREFIX to a folder of yours"
  exec 9>"$prefix/lock"
  if ! flock -n 9; then
    say "another run is installing nsys, waiting for it"
    flock 9
    ! usable "$prefix/bin/nsys" || return 0
  fi
  rm -rf "$prefix"/partial.*
  work="$(mktemp -d "$prefix/partial.XXXXXX")"
  {
    "$1"
    check "$target/nsys"
  } 9>&- # what apt or nsys leave running must not hold the lock
  rm -rf "${prefix:?}/nsight-systems" "${prefix:?}/bin" "$prefix/downloads"
  mv "$work/nsight-systems" "$prefix/nsight-systems"
  mkdir "$work/bin"
  ln -s "../nsight-systems/$(basename "$target")/nsys" "$work/bin/nsys"
  mv "$work/bin" "$prefix/bin"
  say "ready: $("$prefix/bin/nsys" --version)"
  ! nvidia-smi -L >/dev/null 2>&1 ||
    say "this machine has a GPU, whose CUDA may be newer than this nsys knows: if no kernels arrive, $by_hand"
}

# The files needed to record CUDA, import and export: the recorder without CUPTI for CUDA before 12 and without tracing of
# graphics, the importer and the libraries that it loads.
list_needed() {
  (cd "$target" && find . -type f) | grep -vE '/(libcupti\.so\.1[01]\.|libnvperf|CollectX/|vulkan-layers/|sqlite3$)' |
    sed "s|^\.|${target##*/}|"
  echo "${host##*/}/QdstrmImporter"
  ldd "$host/QdstrmImporter" | sed -n "s|.*=> $host/\([^ ]*\) .*|${host##*/}/\1|p"
}

# Packs the nsys of the private folder, and checks the archive.
pack() {
  local nsys partial
  [ -n "$1" ] || fail "--pack needs the name of the archive, such as nsys.tar.xz"
  usable "$prefix/bin/nsys" || install fetch
  nsys="$(readlink -f "$prefix/bin/nsys")"
  target="$(dirname "$nsys")"
  host="$(compgen -G "${target%/*}/host-linux-*")" && [ -x "$host/QdstrmImporter" ] || fail "$nsys has no importer beside it: $by_hand"
  work="$(mktemp -d)"
  partial="$work/${1##*/}" # tar compresses by the suffix
  list_needed | sort -u | tar -chaf "$partial" --transform 's|^|nsight-systems/|' -C "${target%/*}" -T -
  echo "$(digest "$partial")  ${1##*/}" >"$partial.sha256"
  NSYS_ARCHIVE="$partial" unpack
  check "$target/nsys"
  mv "$partial" "$partial.sha256" "$(dirname "$1")" || fail "cannot write $1"
  say "packed $("$nsys" --version), $(($(stat -c %s "$1") / 1000000)) MB: give it as NSYS_ARCHIVE=$1"
}

main() {
  if [ "${1:-}" = --pack ]; then
    pack "${2:-}"
    return
  fi
  if [ -n "${NSYS_ARCHIVE:-}" ]; then
    [ -r "$NSYS_ARCHIVE" ] || fail "NSYS_ARCHIVE=$NSYS_ARCHIVE cannot be read"
    usable "$prefix/bin/nsys" || install unpack
  elif ! usable "$prefix/bin/nsys"; then
    [ "${NSYS_FETCH:-1}" != 0 ] || fail "there is no nsys in $prefix, and NSYS_FETCH=0: $by_hand"
    install fetch
  fi
  echo "$prefix/bin/nsys"
}

main "$@"
