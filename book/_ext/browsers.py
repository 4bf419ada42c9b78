"""The browser that tests and pictures use: a Chromium on the PATH."""

import shutil

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
