#!/bin/sh
# Installs, configures, starts, upgrades and purges the package in a bare Debian system that systemd has booted, and checks
# each step. `run.sh` starts it there. Usage: debian.sh FIRST.deb SECOND.deb
set -eux

# `! COMMAND` would not end the test.
fails() {
    if "$@"; then exit 1; fi
}
# status URL: the status code of a response.
status() {
    curl --silent --output /dev/null --write-out '%{http_code}' "$1"
}
main_pid() {
    systemctl show --property=MainPID --value transom.service
}
# until_true COMMAND: waits for a condition; the service manager ends the test if it never becomes true.
until_true() {
    until "$@"; do sleep 0.1; done
}
replaced() {
    [ "$(main_pid)" != "$1" ]
}
serves() {
    [ "$(status "$1")" = "$2" ]
}

config=/etc/transom/gateway.toml
# Seconds from the installation to the first refusal, with one edited line.
FIRST_REFUSAL_LIMIT_S=120
api=http://127.0.0.1:8080/api

: 'Install: nothing runs yet. One edited line, a start, and the sixth request is refused.'
start=$(date +%s)
dpkg --install "$1"
fails systemctl --quiet is-active transom.service
transom check --config $config
sed -i 's,^windows.*,windows = ["5/day"],' $config
systemctl enable --now transom.service
for _ in 1 2 3 4 5; do serves $api 200; done
serves $api 429
seconds=$(($(date +%s) - start))
echo "$seconds" >/packages/first-refusal-s
test "$seconds" -lt $FIRST_REFUSAL_LIMIT_S
transom health --config $config
test "$(stat --format=%U "/proc/$(main_pid)")" = transom
test -s /var/log/transom/access.log
man_page=/usr/share/man/man1/transom.1.gz
gunzip --stdout $man_page | grep --quiet '^.TH transom'
bash -c '. /usr/share/bash-completion/completions/transom && complete -p transom'
grep --quiet '^#compdef transom' /usr/share/zsh/vendor-completions/_transom
grep --quiet '^complete -c transom' /usr/share/fish/vendor_completions.d/transom.fish

: 'The unit is as hardened as systemd-analyze can tell, and runs with a filter of system calls.'
systemd-analyze security --threshold=20 --no-pager transom.service
grep '^Seccomp:.*2$' "/proc/$(main_pid)/status"

: 'Reload, and a rotated log.'
mv /var/log/transom/access.log /var/log/transom/access.log.1
systemctl reload transom.service
until_true test -e /var/log/transom/access.log
serves $api 429

: 'A privileged port. Counters survive the restart.'
sed -i 's,^http .*,http = "127.0.0.1:80",' $config
systemctl restart transom.service
serves http://127.0.0.1/api 429

: 'Upgrade within one version.'
old=$(main_pid)
transom upgrade --config $config
until_true replaced "$old"
serves http://127.0.0.1/api 429

: 'A new version of the package, with another configuration: the edited one stays, the new one lies beside it. The running'
: 'gateway hands over, with its counters.'
old=$(main_pid)
cp $config /tmp/edited.toml
dpkg --force-confdef --install "$2"
until_true replaced "$old"
cmp $config /tmp/edited.toml
grep --quiet '^# A new line' $config.dpkg-dist
serves http://127.0.0.1/api 429
systemctl --quiet is-active transom.service
test "$(dpkg-query --show --showformat='${Version}' transom)" = "$(dpkg-deb --field "$2" Version)"

: 'A crash: systemd restarts the gateway, and counters survive.'
old=$(main_pid)
systemctl kill --signal=KILL transom.service
until_true replaced "$old"
until_true systemctl --quiet is-active transom.service
serves http://127.0.0.1/api 429

: 'Sockets from systemd, without a capability.'
systemctl stop transom.service
mkdir -p /etc/systemd/system/transom.socket.d /etc/systemd/system/transom.service.d
printf '[Socket]\nListenStream=\nListenStream=127.0.0.1:80\n' >/etc/systemd/system/transom.socket.d/test.conf
printf '[Service]\nAmbientCapabilities=\nCapabilityBoundingSet=\nPrivateUsers=yes\n' >/etc/systemd/system/transom.service.d/test.conf
systemctl daemon-reload
systemctl start transom.socket transom.service
serves http://127.0.0.1/api 429
old=$(main_pid)
transom upgrade --config $config
until_true replaced "$old"
serves http://127.0.0.1/api 429
rm -r /etc/systemd/system/transom.socket.d /etc/systemd/system/transom.service.d

: 'Nothing was forbidden that the gateway tried.'
journalctl --no-pager --unit=transom.service >/tmp/journal
grep 'listening on' /tmp/journal
fails grep -i 'not permitted\|permission denied\|cannot\|panicked' /tmp/journal

: 'Removal keeps the edited configuration; purge keeps nothing.'
dpkg --remove transom
fails systemctl --quiet is-active transom.service
cmp $config /tmp/edited.toml
dpkg --purge transom
rest=$(find / -xdev -name '*transom*' -not -path '/proc/*' -not -path '/packages/*' -not -path '/tmp/*')
test -z "$rest"
