#!/usr/bin/env bash
# apptainer.sh FOLDER - unpack Apptainer and a small image, FOLDER/image.sif, for the tests of containers.
# On Debian 12, as root; installs nothing. Debian 12 has no Apptainer: the one of sid runs with its own C library.
# The image has bash, coreutils and the libraries that a bound Python needs, but no commands of Slurm.
set -euo pipefail
F=$(realpath -m "$1"); [ -f "$F/image.sif" ] && exit 0
rm -rf "$F"; mkdir -p "$F"/apt/{lists,archives}/partial "$F"/{sid,image}; cd "$F/apt"
key=/usr/share/keyrings/debian-archive-keyring.gpg
for suite in bookworm sid; do echo "deb [signed-by=$key] http://deb.debian.org/debian $suite main"; done >sources.list
apt=(apt-get -q -o Dir::Etc::sourcelist="$PWD/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o Dir::State::lists="$PWD/lists" -o Dir::Cache="$PWD" -o APT::Sandbox::User=root)
"${apt[@]}" update >/dev/null
# unpack TARGET SUITE PACKAGE...
unpack() {
  local target=$1 suite=$2; shift 2
  "${apt[@]}" download "${@/%//$suite}" >/dev/null
  for file in *.deb; do dpkg -x "$file" "$target"; done
  rm ./*.deb
}
unpack "$F" sid apptainer
unpack "$F/sid" sid libc6 libseccomp2 libsqlite3-0
unpack "$F" bookworm squashfs-tools squashfuse libsquashfuse0 libfuse3-3 liblzo2-2 patchelf
unpack "$F/image" bookworm base-files bash coreutils libacl1 libattr1 libbz2-1.0 libc6 libcrypt1 libffi8 \
  libgcc-s1 libgmp10 liblzma5 libpcre2-8-0 libreadline8 libselinux1 libsqlite3-0 libssl3 libstdc++6 libtinfo6 zlib1g
lib=lib/x86_64-linux-gnu
cd "$F"
patch() { usr/bin/patchelf --force-rpath "$@"; }
patch --set-interpreter "$F/sid/usr/$lib/ld-linux-x86-64.so.2" --set-rpath "$F/sid/usr/$lib" \
  usr/bin/apptainer usr/$lib/apptainer/bin/starter
patch --set-rpath "$F/usr/$lib:$F/$lib" usr/bin/{mksquashfs,squashfuse_ll} usr/$lib/libsquashfuse*.so.0.0.0
# Apptainer looks for its settings and its working folder beside its program and beside its starter.
mkdir -p var/lib/apptainer/mnt/session; ln -s ../etc ../var usr; ln -s ../../etc ../../var usr/lib
echo "binary path = \$PATH:$F/usr/bin" >>etc/apptainer/apptainer.conf
touch image/etc/{passwd,group}; ln -sf bash image/bin/sh
usr/bin/apptainer -s build --userns partial.sif image
mv partial.sif image.sif; rm -r apt image
