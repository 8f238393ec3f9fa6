"""Chromium without a window, driven by selenium; tests that need it are skipped where it is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1000"),
    # A page that needs the network fails here.
    *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--disable-background-networking"),
)


class Browser:
    """A browser that remembers what its console said."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, address: str | Path) -> None:
        """Open a page, after forgetting what the console said about earlier ones."""
        self.driver.get_log("browser")
        self.driver.get(address.resolve().as_uri() if isinstance(address, Path) else address)

    def complaints(self) -> list[str]:
        """Errors and warnings in the console since `open`, such as a file that was not found."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def run(self, script: str, *arguments: object) -> object:
        """What a piece of JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size of the page itself; a window cannot be narrower than 500 pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    driver_path = shutil.which("chromedriver")
    if binary is None or driver_path is None:
        pytest.skip("Chromium is not installed: apt-get install chromium chromium-driver")
    options = Options()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    driver.set_page_load_timeout(120)
    yield Browser(driver)
    driver.quit()
