#!/bin/sh
# Builds the packages: build.sh [OUT], or downloads what that needs: build.sh --fetch FOLDER
#
# OUT (default: dist) gets the deb, the rpm, the wheel that is in both, a bill of materials, and SHA256SUMS of
# these. The same sources make the same bytes, wherever and whenever; of the deb and the rpm on the same release
# of a distribution, whose tools write parts of them.
#
#   PYTHON             an interpreter with pip; default python3
#   SOURCE_DATE_EPOCH  the time of everything; default that of the last commit
#   SDISTS             a folder that --fetch has filled: then nothing is downloaded
#
# Needs dpkg-dev, debhelper and rpm.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export LC_ALL=C.UTF-8 TZ=UTC PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0
unset PYTHONPATH MAKEFLAGS DEB_BUILD_OPTIONS DEB_BUILD_PROFILES
umask 022
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }
take() { # NAME COMMAND...: what requirements.txt pins as NAME
  grep "^$1==" packaging/requirements.txt >"$work/$1.txt"
  name=$1
  shift
  pip "$@" --no-deps --require-hashes ${SDISTS:+--no-index --find-links "$SDISTS"} -r "$work/$name.txt"
}
tools() {
  take setuptools install --root-user-action=ignore --target "$work/tools"
  export PYTHONPATH="$work/tools"
}

if [ "${1-}" = --fetch ]; then
  take setuptools download --dest "$2"
  tools
  take sdnotify download --no-build-isolation --no-binary :all: --dest "$2"
  exit
fi

out=${1:-dist}
mkdir -p "$out"
out=$(cd "$out" && pwd)

if [ -z "${SOURCE_DATE_EPOCH-}" ]; then
  SOURCE_DATE_EPOCH=$(git log -1 --format=%ct -- pyproject.toml) && [ "$SOURCE_DATE_EPOCH" ] || {
    echo "build.sh: git does not tell a time for what is built here: set SOURCE_DATE_EPOCH" >&2
    exit 1
  }
  SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
fi
export SOURCE_DATE_EPOCH

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' preloadd/__init__.py)
# Before the version itself, as packages sort it.
packaged=$(echo "$version" | sed 's/\([0-9]\)\(a\|b\|rc\|\.dev\)\([0-9]\)/\1~\2\3/')
top=$work/preloadd-$packaged
mkdir "$top"
find CHANGELOG.md CONTRIBUTING.md LICENSE README.md pyproject.toml docs etc packaging preloadd systemd -type f \
  ! -name '*.pyc' -exec cp --parents -t "$top" {} +
chmod -R u=rwX,go=rX "$top"

echo "build.sh: wheels of preloadd $version" >&2
tools
take sdnotify wheel --use-pep517 --no-build-isolation --no-cache-dir --no-binary :all: -w "$top/wheels"
cp -r "$top" "$work/tree"
pip wheel --no-index --no-deps --no-build-isolation -w "$top/wheels" "$work/tree"
unset PYTHONPATH
"$python" packaging/sbom.py "$top"/wheels/preloadd-*.whl "$top"/wheels/sdnotify-*.whl >"$top/wheels/sbom.json"

find "$top" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

echo "build.sh: deb" >&2
cp -a "$top" "$work/deb"
(
  cd "$work/deb"
  cp -a packaging/deb/debian debian
  date=$(date -R -d "@$SOURCE_DATE_EPOCH")
  sed "s/@VERSION@/$packaged/; s/@DATE@/$date/" debian/changelog.in >debian/changelog
  dpkg-buildpackage -b -us -uc -d >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
)

echo "build.sh: rpm" >&2
mkdir -p "$work/rpm/SOURCES"
tar --sort=name --owner=0 --group=0 --numeric-owner -C "$work" -cf - "preloadd-$packaged" |
  gzip -9n >"$work/rpm/SOURCES/preloadd-$packaged.tar.gz"
sed "s/@VERSION@/$packaged/; s/@DATE@/$(date -d "@$SOURCE_DATE_EPOCH" '+%a %b %d %Y')/" \
  packaging/rpm/preloadd.spec >"$work/preloadd.spec"
rpmbuild -bb --nodeps --define "_topdir $work/rpm" --define "_tmppath $work" --define "_buildhost reproducible" \
  --define "use_source_date_epoch_as_buildtime 1" --define "clamp_mtime_to_source_date_epoch 1" \
  --define "build_mtime_policy clamp_to_source_date_epoch" \
  "$work/preloadd.spec" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }

cd "$out"
rm -f preloadd_*.deb preloadd-*.rpm preloadd-*.whl preloadd-*.cdx.json SHA256SUMS
cp "$work"/preloadd_*.deb "$work"/rpm/RPMS/noarch/preloadd-*.rpm "$top"/wheels/preloadd-*.whl .
cp "$top/wheels/sbom.json" "preloadd-$packaged.cdx.json"
sha256sum -- preloadd[_-]* | tee SHA256SUMS
