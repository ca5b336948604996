# Makes the root of a machine out of $ROOT, in namespaces of its own, and becomes its systemd.
#
#   boot.sh SCRATCH UNIT [FOLDER INSIDE]...
#
# SCRATCH is an empty folder; UNIT is what to boot. Each FOLDER is shown read-only at INSIDE. $LAYERS are
# folders whose content is laid over the root, $MASK units that are to do nothing, $PREPARE is a command
# to run inside before systemd is there.
#
# Called with mount, PID, UTS, IPC, network and cgroup namespaces of its own. Nothing that happens inside
# is written to this machine's disk, kernel settings or control groups.

set -eu
scratch=$1 unit=$2
shift 2
root=$scratch/root

mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$scratch"
mkdir "$scratch/upper" "$scratch/work" "$root"
# Copied, because an overlay refuses layers of which one lies inside the other.
for layer in $LAYERS; do cp -a "$layer/." "$scratch/upper/"; done
mount -t overlay -o "lowerdir=$ROOT,upperdir=$scratch/upper,workdir=$scratch/work" overlay "$root"

# Where these can be written, systemd sets up the kernel, and that is the one all share.
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
# What systemd would set, for this network namespace alone: how many messages a notify socket holds.
echo 512 >"$root/proc/sys/net/unix/max_dgram_qlen"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o nosuid,nodev,noexec,ro sysfs "$root/sys"
# Mounted anew, never bound: systemd would remount the other one read-only for everybody.
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"

mount -t tmpfs -o nosuid,mode=755 tmpfs "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm"
while read -r name major minor; do
  mknod "$root/dev/$name" c "$major" "$minor"
  chmod 666 "$root/dev/$name"
done <<END
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
END
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"
mount -t tmpfs -o nosuid,nodev,mode=755 tmpfs "$root/run"
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs "$root/tmp"

while [ $# -ge 2 ]; do
  mkdir -p "$root/$2"
  mount --bind "$1" "$root/$2"
  mount -o remount,bind,ro "$root/$2"
  shift 2
done

rm -rf "$root/var/log/journal"
mkdir -p "$root/etc/systemd/system" "$root/etc/systemd/journald.conf.d" "$root/mnt"
for name in $MASK; do ln -sf /dev/null "$root/etc/systemd/system/$name"; done
printf '[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n' \
  >"$root/etc/systemd/journald.conf.d/zz-test.conf"
chroot "$root" sh -euc "$PREPARE"

cd "$root"
pivot_root . mnt
umount -l /mnt
exec env -i container=preloadd-test "PATH=$PATH" LANG=C.UTF-8 \
  /lib/systemd/systemd --system "--unit=$unit" --show-status=no
