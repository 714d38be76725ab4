"""The Space in a real browser: Debian's `chromium`, driven by the Python package `playwright`."""

import os
import shutil

import pytest
from test_app import TOKENIZER, pair

import app


sync_api = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)"),
]
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
PATIENCE = 180_000  # milliseconds, for a machine that does other things as well
# Where to keep a picture of every page at its end, to look at.
PICTURES = os.environ.get("PICTURES")
WIDE, NARROW = {"width": 1280, "height": 1000}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def url():
    drafter, target, tokenizer = pair()
    assert tokenizer is TOKENIZER
    demo = app.build_demo(drafter, target, tokenizer=tokenizer)
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    yield url
    demo.close()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, url, request):
    """Opens the page as a new visitor, who drafts chains."""
    contexts, errors = [], []

    def visit(viewport=WIDE):
        contexts.append(browser.new_context(viewport=viewport))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(url, wait_until="domcontentloaded")
        page.get_by_label(app.CHAIN).check()
        page.on("pageerror", lambda error: errors.append(error))
        return page

    yield visit
    for number, context in enumerate(contexts):
        (page,) = context.pages
        if PICTURES:
            page.screenshot(path=f"{PICTURES}/{request.node.name}-{number}.png", full_page=True)
        context.close()
    assert not errors


def ask(page, message, max_tokens=24):
    page.get_by_label("number input for New tokens at most").fill(str(max_tokens))
    page.get_by_label("Message").fill(message)
    page.get_by_role("button", name="Send").click()


def wait_for(page, selector, count=1):
    page.wait_for_function(f"document.querySelectorAll({selector!r}).length >= {count}")


def test_a_chat_streams_in_colours_to_a_badge_and_goes_on(visit):
    page = visit()
    page.evaluate(
        """() => { window.seen = new Set(); setInterval(() => {
        const text = document.querySelector("#newest .drafted .text");
        if (text) window.seen.add(text.textContent.length); }, 20) }"""
    )
    ask(page, "Hello", 200)
    wait_for(page, "#newest .verdict.same")
    assert len(page.evaluate("[...window.seen]")) > 3  # it grew before one's eyes
    assert page.locator("#newest .verdict").text_content() == "✓ outputs identical: 200 of 200 tokens"
    assert page.locator("#newest .plain .text").text_content() == page.locator("#newest .drafted .text").text_content()
    colour = "element => getComputedStyle(element).backgroundColor"
    colours = [page.locator(f"#newest .drafted .text .d{depth}").first.evaluate(colour) for depth in (0, 1)]
    bars = [page.locator(f"#newest .bars .d{depth}").evaluate(colour) for depth in (0, 1)]
    assert len(set(colours)) == 2 and "rgba(0, 0, 0, 0)" not in colours and bars == colours
    assert page.locator("#newest .plain .text span").count() == 0
    assert page.get_by_label("Message").input_value() == ""

    ask(page, "And now?")
    wait_for(page, "#earlier .turn")
    wait_for(page, "#newest .verdict.same")
    assert page.locator("#earlier .turn .message").text_content() == "Hello"
    assert page.locator("#newest .turn .message").text_content() == "And now?"
    page.get_by_role("button", name="Clear").click()
    page.wait_for_function("document.querySelectorAll('.turn').length == 0")


def test_stop_ends_the_turn_and_the_next_one_runs(visit):
    page = visit()
    ask(page, "Hello", 450)
    wait_for(page, "#newest .drafted .text .d0")
    page.get_by_role("button", name="Stop").click()
    page.wait_for_function("document.querySelector('#newest .verdict').textContent.startsWith('stopped')")
    words = page.locator("#newest .drafted .text").text_content()
    page.wait_for_timeout(1000)
    assert page.locator("#newest .drafted .text").text_content() == words
    assert page.locator("#newest .drafted small").text_content() in ("first, stopped", "first, done")
    ask(page, "Go on", 8)
    wait_for(page, "#earlier .turn")
    wait_for(page, "#newest .verdict.same")


def test_two_visitors_at_once_do_not_see_one_another(visit):
    one, other = visit(), visit()
    ask(one, "Hello", 200)
    ask(other, "Who?", 24)
    wait_for(other, "#newest .verdict.same")
    wait_for(one, "#newest .verdict.same")
    assert one.locator("#newest .message").text_content() == "Hello"
    assert other.locator("#newest .message").text_content() == "Who?"
    assert "200 of 200" in one.locator("#newest .verdict").text_content()
    assert "24 of 24" in other.locator("#newest .verdict").text_content()
    assert one.locator(".turn").count() == other.locator(".turn").count() == 1


def test_markup_and_templates_are_shown_as_text(visit):
    page = visit()
    text = "<img src=x onerror='window.hit = 1'> ${window.hit = 2} {{value}} `x`"
    ask(page, text, 8)
    wait_for(page, "#newest .verdict.same")
    assert page.locator("#newest .message").text_content() == text
    assert page.evaluate("window.hit") is None and page.locator("#newest img").count() == 0
    page.get_by_label("Message").fill("a" * 600)
    page.get_by_role("button", name="Send").click()
    page.get_by_text("exceeds the target's 512").wait_for()
    assert page.get_by_label("Message").input_value() == "a" * 600


def test_a_narrow_screen_has_the_columns_one_above_the_other(visit):
    page = visit(NARROW)
    ask(page, "Hello")
    wait_for(page, "#newest .verdict.same")
    plain, drafted = (page.locator(f"#newest .{way}").bounding_box() for way in app.WAYS)
    assert drafted["y"] >= plain["y"] + plain["height"] and drafted["width"] == plain["width"] > 250
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    wide = visit()
    ask(wide, "Hello")
    wait_for(wide, "#newest .verdict.same")
    plain, drafted = (wide.locator(f"#newest .{way}").bounding_box() for way in app.WAYS)
    assert drafted["y"] == plain["y"] and drafted["x"] >= plain["x"] + plain["width"]
