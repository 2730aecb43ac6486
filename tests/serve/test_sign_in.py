"""A person with a key opens the dashboard in a real browser, on the real application with all its headers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright
from server import served

from moedraft.storage.keys import KeyFile

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-background-networking", "--disable-gpu", "--disable-dev-shm-usage"]
SLOW = 20_000  # ms; a machine may be busy with other things


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_key_signs_in_and_out(tmp_path: Path) -> None:
    with served(tmp_path, dashboard=True) as found, sync_playwright() as playwright:
        _, secret = KeyFile(tmp_path).create(["dashboard"])
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(SLOW)
        page.goto(f"{found.url}/dashboard")
        assert "/login" in page.url
        page.fill("#key", "wrong")
        page.get_by_role("button").click()
        expect(page.locator("#key")).to_be_visible(timeout=SLOW)
        page.fill("#key", secret)
        page.get_by_role("button").click()
        expect(page.get_by_text("Tokens per second").first).to_be_visible(timeout=SLOW)
        page.get_by_text("Sign out").click()
        expect(page.locator("#key")).to_be_visible(timeout=SLOW)
        page.goto(f"{found.url}/dashboard")
        assert "/login" in page.url
        browser.close()
