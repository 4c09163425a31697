# shellcheck shell=bash
# Folders and process ids of the scripts beside this one, which run as root. To be sourced.
#
# The scripts find again what they started by files: process ids, sockets, keys. Any user can make a
# folder of a known name in /tmp first, so theirs are in /run or /var/lib, or in one of the user.

fail_with() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

# Print where a script keeps its files unless given another folder. PARENT: /run, or /var/lib for
# what is large or executed, which /run often forbids.
default_folder() { # default_folder NAME [PARENT]
  if [ "$(id -u)" = 0 ]; then
    echo "${2:-/run}/$1"
  else
    echo "${XDG_RUNTIME_DIR:-$HOME/.cache}/$1"
  fi
}

# Refuse a folder that another user owns, may write to, or can put another in place of.
check_folder() { # check_folder DIR
  local at mode owner
  if [ -L "$1" ]; then fail_with "$1 is a symbolic link; remove it, or name another folder"; fi
  at=$(realpath -m "$1")
  if [ -e "$at" ]; then
    read -r owner mode < <(stat -c '%u %a' "$at")
    if [ "$owner" != "$(id -u)" ]; then
      fail_with "$1 belongs to user $owner; remove it, or name another folder"
    elif [ ! -d "$at" ] || ((8#$mode & 8#022)); then
      fail_with "$1 is no folder, or others may write to it (mode $mode); remove it, or name another"
    fi
  fi
  while [ "$at" != / ]; do
    at=$(dirname "$at")
    [ -e "$at" ] || continue
    read -r owner mode < <(stat -c '%u %a' "$at")
    if [ "$owner" != 0 ] && [ "$owner" != "$(id -u)" ]; then
      fail_with "$at, where $1 lies, belongs to user $owner; name another folder"
    elif ((8#$mode & 8#002)) && ! ((8#$mode & 8#1000)); then
      fail_with "$at, where $1 lies, may be written by all users; name another folder"
    fi
  done
}

# Make a folder that is ours alone, or check the one that is there.
own_folder() { # own_folder DIR [MODE]
  check_folder "$1"
  (umask 022 && mkdir -p "$(dirname "$1")")
  mkdir -m 700 "$1" 2>/dev/null || true
  check_folder "$1"
  chmod "${2:-700}" "$1"
}

# Whether the process of a file is what we started: ours, running this program, with this text among
# its arguments or variables. A stale id may be another program's; an unreaped zombie is gone.
is_running() { # is_running PID_FILE PROGRAM TEXT
  local pid
  [ -f "$1" ] && pid=$(cat "$1") && [[ $pid =~ ^[0-9]+$ ]] || return 1
  [ "$(stat -c %u "/proc/$pid" 2>/dev/null)" = "$(id -u)" ] || return 1
  [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ] || return 1
  ! grep -q '^State:[[:space:]]*Z' "/proc/$pid/status" 2>/dev/null || return 1
  # -a without -q: a pipe that is closed early would fail under pipefail.
  cat "/proc/$pid/cmdline" "/proc/$pid/environ" 2>/dev/null | grep -aF -- "$3" >/dev/null
}
