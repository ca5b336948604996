#!/bin/sh
# What goes where, for every kind of package: install.sh DESTDIR
#
# Run in the top folder of the sources; $WHEELS (default: wheels) is the folder with the wheels of preloadd and
# of what is carried along, and sbom.json, which says so (see build.sh).
set -eu
case ${1-} in
'') echo "usage: install.sh DESTDIR (/ is this host itself)" >&2; exit 2 ;;
/*) dest=${1%/} ;;
*) dest=$PWD/$1 ;;
esac
wheels=${WHEELS:-wheels}
cd "$(dirname "$0")/.."
umask 022

put() { # MODE FILE... FOLDER/, or MODE FILE TARGET
  mode=$1
  shift
  for target; do :; done
  while [ $# -gt 1 ]; do
    case $target in
    */) install -D -p -m "$mode" "$1" "$dest$target${1##*/}" ;;
    *) install -D -p -m "$mode" "$1" "$dest$target" ;;
    esac
    shift
  done
}

page() { # FILE SECTION
  install -d "$dest/usr/share/man/man$2"
  gzip -9n <"$1" >"$dest/usr/share/man/man$2/${1##*/}.gz"
}

unpack() { # WHEEL FOLDER
  install -d "$dest$2"
  python3 -m zipfile -e "$1" "$dest$2"
  # For tools that install wheels, and licences, which are elsewhere. What stays tells versions and entry points.
  (cd "$dest$2"/*.dist-info && rm -rf RECORD WHEEL top_level.txt LICENSE* licenses)
}

unpack "$wheels"/preloadd-*.whl /usr/lib/preloadd
# Searched last, so that an engine's own goes first: see preloadd/linux/notify.py.
unpack "$wheels"/sdnotify-*.whl /usr/lib/preloadd/bundled

put 755 packaging/common/preloadd packaging/common/preloadd-python /usr/libexec/preloadd/
put 755 packaging/common/preloadctl /usr/bin/
ln -sfn ../libexec/preloadd/preloadd "$dest/usr/bin/preloadd"
page packaging/common/preloadctl.1 1
page packaging/common/preloadd.8 8
put 644 packaging/common/preloadctl.bash /usr/share/bash-completion/completions/preloadctl

put 644 systemd/*.service systemd/*.target /usr/lib/systemd/system/
put 755 systemd/preloadd-generator /usr/lib/systemd/system-generators/
put 644 systemd/preloadd.sysusers /usr/lib/sysusers.d/preloadd.conf
put 644 systemd/preloadd.tmpfiles /usr/lib/tmpfiles.d/preloadd.conf
put 644 systemd/preloadd.preset /usr/lib/systemd/system-preset/50-preloadd.preset
put 644 systemd/preloadd.needrestart /etc/needrestart/conf.d/preloadd.conf

put 644 etc/preloadd/preloadd.toml /etc/preloadd/
put 644 etc/preloadd/groups.d/*.toml.example /etc/preloadd/groups.d/
put 644 etc/default/preloadd /etc/default/
put 644 "$wheels/sbom.json" /usr/share/doc/preloadd/preloadd.cdx.json
# As they lie in the sources, and not compressed: they link to one another.
# Editors and patches may have left something beside them.
pages=$(find README.md CHANGELOG.md CONTRIBUTING.md docs packaging/container -type f \
  ! -name '.*' ! -name '*~' ! -name '*.orig' ! -name '*.rej' ! -name '*.bak')
while read -r file; do put 644 "$file" "/usr/share/doc/preloadd/$file"; done <<EOF
$pages
EOF
