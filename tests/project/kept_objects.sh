#!/bin/sh
# A compiler that keeps the objects of the kernel's sources in the directory $KEPT_OBJECTS, and otherwise
# calls $KEPT_COMPILER. The directory is for one state of the sources and of the compiler.
set -e
source='' output='' notes='' is_compiled='' before=''
for word; do
    case $before in
    -o) output=$word ;;
    -aux-info) notes=$word ;;
    esac
    case $word in
    -c) is_compiled=1 ;;
    *.[cS]) source=$word ;;
    esac
    before=$word
done
# Sources with absolute paths are not the kernel's.
case $is_compiled$source in
1[!/]*) ;;
*) exec "$KEPT_COMPILER" "$@" ;;
esac
# The directory of a build has a new name each time.
key=$(printf '%s\n' "$@" | sed 's|/[^ =]*/kprobefs-image-[^/ =]*||g' | sha256sum)
kept=$KEPT_OBJECTS/${key%% *}
if [ ! -e "$kept.o" ]; then
    "$KEPT_COMPILER" "$@"
    # Another worker may build the same.
    [ -z "$notes" ] || { cp "$notes" "$kept.$$" && mv "$kept.$$" "$kept.notes"; }
    cp "$output" "$kept.$$" && mv "$kept.$$" "$kept.o"
    exit
fi
cp "$kept.o" "$output"
[ -z "$notes" ] || cp "$kept.notes" "$notes"
