"""The page in a real browser: nothing fails, nothing is fetched, everything is seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report import PLOTS, fill

from allocmoe.report import write_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZES = """
    return Array.from(document.querySelectorAll("figure svg")).map(function (svg) {
        var box = svg.getBoundingClientRect();
        return [svg.closest(".card").id, svg.getAttribute("class"), box.width * box.height];
    });
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(fill(tmp_path_factory.mktemp("report"))).page


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.as_uri())
    return browser


def emulate(browser: Any, *, width: int = 1280, theme: str = "light", media: str = "") -> None:
    scheme = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def test_no_error_and_no_request(opened: Any, page: Path) -> None:
    assert opened.title == "tiny/moe: allocmoe report"
    assert opened.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert asked == [page.as_uri()]
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize(
    ("theme", "media", "shown"),
    [("light", "", "light"), ("dark", "", "dark"), ("dark", "print", "light")],
)
def test_each_plot_is_seen_in_its_theme(opened: Any, theme: str, media: str, shown: str) -> None:
    emulate(opened, theme=theme, media=media)
    sizes = opened.execute_script(SIZES)
    assert {key for key, name, area in sizes if name == shown and area > 10_000} == PLOTS
    assert all(area == 0 for _, name, area in sizes if name != shown)


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_sticks_out_sideways(opened: Any, width: int, theme: str) -> None:
    emulate(opened, width=width, theme=theme)
    opened.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert opened.execute_script("return window.innerWidth") == width
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("clipboard", [True, False])
def test_the_copy_button(opened: Any, clipboard: bool) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    emulate(opened)
    if not clipboard:
        opened.execute_script(
            "Object.defineProperty(navigator, 'clipboard', {value: undefined});"
            "document.execCommand = function () { return false; };"
        )
    button = opened.find_element("css selector", "button[data-copy='results-1']")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    status = "return arguments[0].nextElementSibling.textContent"
    told = WebDriverWait(opened, 5).until(lambda driver: driver.execute_script(status, button))
    assert told == "Copied." if clipboard else told.startswith("The table is selected")
    if not clipboard:
        selected = opened.execute_script("return String(window.getSelection())")
        assert "alloc-moe@6" in selected
        assert "uniform@9" in selected
    assert opened.get_log("browser") == []


def test_the_results_fit_on_printed_paper(opened: Any) -> None:
    emulate(opened, width=690, media="print")
    assert opened.execute_script("return document.documentElement.scrollWidth") <= 690
