#!/bin/sh
# What the browser tests need besides npm's packages: Node.js and Chromium. Installs Debian's Chromium where it may.
# Exit status 3: it cannot be had here.
set -u

if ! node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b >= 19) ? 0 : 1)' 2> /dev/null; then
  echo "browser tests: Node.js 20.19 or newer is needed" >&2
  exit 3
fi
for name in "${CHROMIUM:-chromium}" chromium-browser google-chrome google-chrome-stable; do
  command -v "$name" > /dev/null && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium > /dev/null && exit 0
fi
echo "browser tests: install Chromium, or name one: CHROMIUM=/path/to/chromium" >&2
exit 3
