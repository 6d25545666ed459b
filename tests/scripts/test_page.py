"""The page of `draftless serve` in a headless Chromium: tokens as they come, coloured by the source that drafted them.

Needs Debian's packages `chromium` (or another Chromium or Chrome) and PyPI's `playwright`; skipped without them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.serving import KEY, Place

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.slow
NAMES = "chromium", "chromium-browser", "google-chrome"
QUESTION = "Repeat: one two three, one two three, one two three."
CONTEXT = 1 << 13  # long enough to stop an answer
SETTINGS = {"temperature": 0, "max_tokens": 40}
LAST = "#log section:last-child"
COUNT = "() => document.querySelectorAll('.token').length"
WATCH = f"""(act) => {{
    const count = {COUNT};
    window.seen = [];
    const see = () => {{ window.seen.push(count()); act && count() > 2 && document.getElementById("stop").click(); }};
    new MutationObserver(see).observe(document.getElementById("log"), {{ childList: true, subtree: true }});
}}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="this needs playwright: pip install playwright")
    place = next(filter(None, map(shutil.which, NAMES)), None)
    if place is None:
        pytest.skip("this needs a browser: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=place)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def place(browser: Browser, save_model: Callable[..., Path]) -> Iterator[Place]:
    place = Place(save_model(max_position_embeddings=CONTEXT), "--proposer", "merged", "--nodes", "8")
    yield place
    assert place.end() == 0


@pytest.fixture
def page(browser: Browser, place: Place) -> Iterator[Page]:
    """The page after it was given the API key. Nothing in it fails, and all that it fetches is of its own origin."""
    origin = place.url.removesuffix("/v1")
    page = browser.new_page()
    page.set_default_timeout(30_000)
    faults: list[Any] = []
    fetched: list[str] = []
    page.on("pageerror", lambda fault: faults.append(fault))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(origin)
    give_key(page, KEY)
    page.wait_for_selector("#model:text-is('tiny')")
    for name, value in SETTINGS.items():
        page.fill(f"#{name}", str(value))
    yield page
    entries = page.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
    assert entries and all(each.startswith(f"{origin}/") for each in entries)
    assert all(each.startswith((f"{origin}/", "data:")) for each in fetched)
    assert not faults
    page.close()


def give_key(page: Page, key: str) -> None:
    page.wait_for_selector("#key")  # waits until it is shown
    page.fill("#key", key)
    page.press("#key", "Enter")


def send(page: Page, question: str) -> None:
    page.fill("#box", question)
    page.press("#box", "Enter")


def ask(page: Page, question: str = QUESTION) -> Locator:
    """The whole answer."""
    send(page, question)
    page.wait_for_selector(f"{LAST} .again:enabled")
    return page.locator(f"{LAST} .answer")


def read_text(answer: Locator) -> str:
    text = answer.locator(".text").text_content()
    assert text is not None
    return text


def read_sources(answer: Locator) -> list[tuple[str, str]]:
    """The class and the title of each token."""
    read = "(spans) => spans.map((each) => [each.className, each.title])"
    return [(kind.removeprefix("token "), title) for kind, title in answer.locator(".token").evaluate_all(read)]


def read_tau(answer: Locator) -> float:
    found = re.search(r"tau (\d+\.\d\d)", answer.locator(".stats").inner_text())
    assert found is not None
    return float(found[1])


def test_tokens_are_shown_as_they_come_and_by_source(page: Page, place: Place) -> None:
    page.evaluate(WATCH, False)
    answer = ask(page)
    seen = page.evaluate("window.seen")
    assert seen == sorted(seen) and len({*seen}) > 2
    messages: Any = [{"role": "user", "content": QUESTION}]
    whole = place.client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=40)
    assert read_text(answer) == whole.choices[0].message.content
    assert whole.usage is not None
    tokens = whole.usage.completion_tokens
    kinds = [kind for kind, _ in read_sources(answer)]
    assert {*kinds} <= {"model", "copied", "recycled", "grammar", "head"} and {"model", "copied"} <= {*kinds}
    assert tokens <= len(kinds) <= tokens + 1  # a last one for text that was held back
    for kind, title in read_sources(answer):
        assert title.startswith("chosen by the model" if kind == "model" else "drafted: "), title
    assert ("copied", "drafted: copied from earlier text (suffix)") in read_sources(answer)
    assert f"{tokens} tokens" in answer.locator(".stats").inner_text()
    assert "tokens/s" in answer.locator(".stats").inner_text() and read_tau(answer) > 1
    legend = answer.locator(".legend li").all_inner_texts()
    share = int(100 * kinds.count("copied") / tokens + 0.5)  # as JavaScript rounds
    assert f"copied from earlier text {share} %" in legend and len(legend) == len({*kinds})


def test_a_seed_gives_the_same_text_without_drafts(page: Page) -> None:
    page.fill("#temperature", "0.9")
    page.fill("#seed", "5")
    drafted = ask(page)
    text, tau = read_text(drafted), read_tau(drafted)
    page.click("#new")
    assert page.locator(".answer").count() == 0
    page.uncheck("#draft")
    plain = ask(page)
    assert read_text(plain) == text
    assert {kind for kind, _ in read_sources(plain)} == {"model"} and read_tau(plain) == 1 <= tau
    page.click("#new")
    page.fill("#seed", "6")
    assert read_text(ask(page)) != text


@pytest.mark.parametrize("first", ["with", "without"])
def test_asking_again_compares_the_texts(page: Page, first: str) -> None:
    second = {"with": "without", "without": "with"}[first]
    page.set_checked("#draft", first == "with")
    page.fill("#temperature", "0.9")  # the seed is chosen by the page
    answer = ask(page)
    page.click(f"text=Ask again {second} drafts")
    page.wait_for_selector(".verdict:not(:empty)")
    assert page.inner_text(".verdict").startswith("the same text")
    assert answer.locator("h2").all_inner_texts() == [f"{first} drafts", f"{second} drafts"]
    for one, name in zip(answer.all(), (first, second), strict=True):
        assert "tokens/s" in one.locator(".stats").inner_text()
        assert name == "with" or {kind for kind, _ in read_sources(one)} == {"model"}


def test_stop_ends_a_run(page: Page, place: Place) -> None:
    aborted = 'request_success_total{finished_reason="abort",model_name="tiny"}'
    before = place.read_metric(aborted)
    page.fill("#max_tokens", "")
    page.uncheck("#draft")
    page.evaluate(WATCH, True)
    send(page, QUESTION)
    page.wait_for_selector(f"{LAST} .stats:has-text('stopped')")
    assert page.is_visible("#send") and not page.is_visible("#stop")
    place.wait_until_idle()
    assert place.read_metric(aborted) > before


def test_a_chat_goes_on(page: Page) -> None:
    first = read_text(ask(page, "<b>One</b>"))
    assert page.inner_text(".question") == "<b>One</b>"  # text, not markup
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Two")
    messages = sent.value.post_data_json["messages"]
    assert [each["content"] for each in messages] == ["<b>One</b>", first, "Two"]
    page.fill("#box", "Three")
    page.press("#box", "Shift+Enter")
    assert page.input_value("#box") == "Three\n"
    page.click("#new")
    assert page.locator("#log section").count() == 0


def test_an_error_is_shown_and_not_kept(page: Page) -> None:
    page.fill("#temperature", "3")
    send(page, QUESTION)
    page.wait_for_selector(f"{LAST} .error:has-text('temperature')")
    page.fill("#temperature", "0")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Two")
    assert len(sent.value.post_data_json["messages"]) == 1


def test_a_wrong_key_is_asked_for_again(page: Page) -> None:
    from playwright.sync_api import expect

    page.evaluate("sessionStorage.clear()")
    page.reload()
    give_key(page, "wrong")
    page.wait_for_selector("#refused:has-text('missing or wrong')")
    page.fill("#box", QUESTION)
    give_key(page, "worse")
    expect(page.locator("#box")).to_have_value(QUESTION)  # it comes back
    give_key(page, KEY)
    page.wait_for_selector(f"{LAST} .again:enabled")
    assert not page.is_visible("#key")
