# bash completion for preloadctl; written by packaging/common/documents.py

_preloadctl_units() {
  systemctl list-units --all --plain --no-legend -- "$1@*.$2" 2>/dev/null |
    sed -n "s/^$1@\\(.*\\)\\.$2 .*/\\1/p"
}

_preloadctl() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} path="" words="" word
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "${path:+$path }$word" in
    "group"|"status"|"start"|"stop"|"restart"|"release"|"load"|"leases"|"logs"|"version"|"cache"|"token"|"doctor"|"config"|"plugin"|"group start"|"group stop"|"group restart"|"group list"|"group show") path="${path:+$path }$word" ;;
    esac
  done
  case "$prev" in
    -o|--output) COMPREPLY=($(compgen -W "table json yaml" -- "$cur")); return ;;
    --socket-dir) COMPREPLY=($(compgen -d -- "$cur")); return ;;
    --timeout|--rank-timeout|--interval|-n|--lines) return ;;
  esac
  case "$path" in
    "") words="status start stop restart release load leases logs version cache token doctor config plugin group --version -h --help" ;;
    "group") words="start stop restart list show" ;;
    "status") words="--watch -w --interval -o --output --json --socket-dir --rank-timeout -h --help" ;;
    "start") words="--wait --no-wait --timeout --socket-dir --rank-timeout -h --help" ;;
    "stop") words="--drain --wait --no-wait --timeout --socket-dir --rank-timeout -h --help" ;;
    "restart") words="--rolling --drain --wait --no-wait --timeout --socket-dir --rank-timeout -h --help" ;;
    "release") words="--socket-dir --rank-timeout -h --help" ;;
    "load") words="--wait --no-wait --timeout --socket-dir --rank-timeout -h --help" ;;
    "leases") words="-o --output --json --socket-dir --rank-timeout -h --help" ;;
    "logs") words="--follow -f --lines -n -h --help" ;;
    "version") words="-o --output --json --socket-dir --rank-timeout -h --help" ;;
    "cache") words="-h --help" ;;
    "token") words="-h --help" ;;
    "doctor") words="-h --help" ;;
    "config") words="-h --help" ;;
    "plugin") words="-h --help" ;;
    "group start") words="--wait --no-wait --timeout --socket-dir --rank-timeout -h --help" ;;
    "group stop") words="--drain --wait --no-wait --timeout --socket-dir --rank-timeout -h --help" ;;
    "group restart") words="--rolling --drain --wait --no-wait --timeout --socket-dir --rank-timeout -h --help" ;;
    "group list") words="-o --output --json --socket-dir --rank-timeout -h --help" ;;
    "group show") words="-o --output --json --socket-dir --rank-timeout --supervisor -h --help" ;;
  esac
  if [[ $cur != -* ]]; then
    case "$path" in
      ""|"group") ;;
      "logs")
        words="$(_preloadctl_units preloadd-group target; _preloadctl_units preloadd service)" ;;
      "status"|"start"|"stop"|"restart"|"release"|"load"|"leases"|"group start"|"group stop"|"group restart"|"group show") words="$(_preloadctl_units preloadd-group target)" ;;
      *) words="" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}

complete -F _preloadctl preloadctl
