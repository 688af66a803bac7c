#!/bin/sh
# What the browser tests need besides npm's packages: Node.js and Chromium. Installs Debian's Chromium where it may.
# Exit status 3: it cannot be had here.
set -u

if ! command -v node > /dev/null || [ "$(node -p 'parseInt(process.versions.node)')" -lt 20 ]; then
  echo "browser tests: Node.js 20 or newer is needed" >&2
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
