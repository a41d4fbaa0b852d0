#!/bin/sh
# Mount ext4 on a RAM disk of 16 MiB at scratch/ext4 of a distribution's kernel. Requests in scratch/ext4 then reach the page
# cache, ext4, jbd2 and the block layer.
#
# kprobefs run --image FILE -- sh -c 'sh examples/ext4.sh && sh my-script.sh'
#
# After `kprobefs mount`, set KPROBEFS to the directory of the mount. With --kprobes kernel there is no machine/call.
set -eu
cd "${KPROBEFS:?}"
PATH=$PATH:/usr/sbin:/sbin
size=0x1000000

call() {
    echo "$*" >machine/call
    read -r _ _ result _ <machine/call
}

fail() {
    echo "ext4.sh: $*: $(cat machine/call)" >&2
    exit 1
}

# Call a function that returns 0 or an error.
must() {
    call "$@"
    [ "$result" = 0x0 ] || fail "$@"
}

# Allocate 16 bytes of zeros (GFP_KERNEL | __GFP_ZERO) for a struct path or a position.
allocate() {
    call mempool_kmalloc 0xdc0 16
}

open() {
    call filp_open "\"$1\"" "$2" 0
    case $result in 0xfffffffffffff*) fail filp_open "$1" ;; esac
}

mkdir scratch/ext4
echo "load brd" >machine/modules
if ! grep -q ' ext4_file_write_iter' machine/kallsyms; then
    # If ext4 is a module, its checksum algorithm may be a module, too.
    echo "load crc32c_generic" >machine/modules 2>/dev/null || :
    echo "load ext4" >machine/modules
fi
mkfs.ext4 -q -b 4096 -E "root_owner=$(id -u):$(id -g)" scratch/ext4.image 16M >/dev/null

# devtmpfs has the node of the RAM disk. ext4 then covers devtmpfs.
allocate
path=$result
must kern_path '"/scratch/ext4"' 1 "$path"
must path_mount '"dev"' "$path" '"devtmpfs"' 0 0

open /scratch/ext4.image 0
image=$result
open /scratch/ext4/ram0 1
disk=$result
allocate
from=$result
allocate
to=$result
call do_splice_direct "$image" "$from" "$disk" "$to" $size 0
[ "$result" = $size ] || fail "copy to the RAM disk"
# The calls run in kernel threads, where filp_close would leave the last step to a worker.
call __fput_sync "$disk"
call __fput_sync "$image"
rm scratch/ext4.image

must path_mount '"/scratch/ext4/ram0"' "$path" '"ext4"' 0 0
