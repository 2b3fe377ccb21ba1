"""The fleet page in a real browser; skipped without a Chromium.  `make campaign` runs this, `make test` does not."""

from collections.abc import Iterator

import pytest

from tests.campaign.browser import Browser, find_browser
from tests.support.fleet_story import Story, member, served

PROGRAM = find_browser()
pytestmark = [pytest.mark.campaign, pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")]
ROWS = "document.querySelectorAll('#verifier-table tbody tr').length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as browser:
        yield browser


def cells(browser: Browser, table: str, row: int) -> list[str]:
    return list(browser.evaluate(f"[...document.querySelectorAll('#{table} tbody tr')[{row}].cells].map(c => c.textContent)"))


def text(browser: Browser, element: str) -> str:
    return str(browser.evaluate(f"document.getElementById('{element}').textContent"))


def test_the_page_shows_the_fleet_and_follows_it(browser):
    story = Story(verifiers=2, drafters=3)
    with served(story) as url:
        browser.open(url)
        browser.wait_for(f"{ROWS} === 2")
        story.advance()
        browser.wait_for("document.querySelector('.tile:nth-child(3) dd').textContent === '2.86'")
        assert "mode auto" in text(browser, "about")
        assert cells(browser, "verifier-table", 0)[:5] == ["verifier-0", "ready", "auto: K 4, 8 ahead", "0", "3"]
        assert browser.evaluate("document.querySelectorAll('#map .lines path').length") == 3
        assert browser.evaluate("document.querySelectorAll('#map .node').length") == 5
        assert browser.evaluate("document.querySelector('.tile:nth-child(3) dd').textContent") == "2.86"

        story.members["drafter-0"] = member("drafter-0", "drafter", "lost")
        story.members["verifier-1"] = member("verifier-1", "verifier", "draining")
        del story.bound["drafter-0"]
        story.advance()
        browser.wait_for("document.querySelector('#map .node[data-state=lost]') !== null")
        assert cells(browser, "verifier-table", 1)[1] == "draining"
        assert cells(browser, "verifier-table", 0)[11] == "drafter-2, drafter-0 (earlier)", "who drafts now comes first"
        assert cells(browser, "drafter-table", 0)[1].startswith("lost, silent for")
        browser.wait_for("document.getElementById('log').textContent.includes('drafter-0 no longer serves verifier-0')")

        browser.evaluate("document.querySelectorAll('#verifier-table thead button')[4].click()")
        assert cells(browser, "verifier-table", 0)[0] == "verifier-1"
        browser.evaluate("document.getElementById('filter').value = 'draining'")
        browser.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
        assert browser.evaluate(ROWS) == 1
        assert browser.problems == []


def test_the_page_says_when_the_gateway_is_lost_and_comes_back(browser):
    story = Story()
    with served(story) as url:
        browser.open(url)
        browser.wait_for("document.getElementById('connection').dataset.state === 'live'")
    browser.wait_for("document.getElementById('connection').dataset.state === 'lost'")
    assert "trying again" in text(browser, "notice")
    assert browser.evaluate("document.getElementById('live').classList.contains('stale')")
    with served(story, port=int(url.rpartition(":")[2])):
        browser.wait_for("document.getElementById('connection').dataset.state === 'live'")
        assert browser.evaluate("document.getElementById('notice').hidden")
    browser.problems.clear()


def test_the_key_is_asked_for(browser):
    with served(Story(), api_key="k3y") as url:
        browser.open(url)
        browser.wait_for("!document.getElementById('key-form').hidden")
        assert browser.evaluate(ROWS) == 0
        enter = "document.getElementById('key').value = '{}'; document.getElementById('key-form').requestSubmit()"
        browser.evaluate(enter.format("k\u0142ucz"))
        browser.wait_for("document.getElementById('notice').textContent.includes('ASCII')")
        browser.evaluate(enter.format("wrong"))
        browser.wait_for("document.getElementById('notice').textContent.includes('wrong')")
        browser.evaluate(enter.format("k3y"))
        browser.wait_for(f"{ROWS} > 0")
        assert browser.evaluate("document.getElementById('key-form').hidden && !location.href.includes('k3y')")
    browser.problems.clear()


def test_hundreds_of_members_in_both_schemes_and_a_narrow_window(browser):
    with served(Story(verifiers=300, drafters=300)) as url:
        grounds = set()
        for dark, width in ((False, 1280), (True, 1280), (False, 400)):
            browser.open(url, dark=dark, width=width)
            browser.wait_for(f"{ROWS} === 300")
            grounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate("document.documentElement.scrollHeight") < 5000
        assert len(grounds) == 2
        assert browser.problems == []
