"""Does a real browser show the file's pixels, from disk and without a network?"""

from __future__ import annotations

import functools
import http.server
import json
import threading

import numpy as np
import pytest
from browser import needs_browser, started
from viewer.pages import data, level, shown, write

from widefield.data.image import colours

pytestmark = needs_browser
SIZE = (1301, 1700)
ROWS, COLUMNS = np.mgrid[: SIZE[0], : SIZE[1]]
IMAGE = np.stack([ROWS // 8 * 37 + COLUMNS // 8 * 11, ROWS * 3 + COLUMNS, ROWS ^ COLUMNS]).astype(np.uint8)
TRUTH = ((ROWS // 40 + COLUMNS // 40) % 5).astype(np.uint8)
PREDICTION = TRUTH.copy()
PREDICTION[1000, 1203] = (TRUTH[1000, 1203] + 1) % 5
CLASSES = ("field", "road", "water", "forest", "<b>town</b>")
BACKGROUND, CUT = (11, 12, 14), (255, 216, 77)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with started(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    settings = shown(classes=CLASSES, space=(2, 1))
    return write(tmp_path_factory.mktemp("viewer"), IMAGE, prediction=PREDICTION, truth=TRUTH, settings=settings)


def url(page, **view) -> str:
    return f"file://{page}/index.html#" + "&".join(f"{key}={value}" for key, value in {"panel": 0, **view}.items())


def middle_of(seen: np.ndarray, pixels: np.ndarray, *, x: float, y: float, zoom: float, side: int = 200) -> tuple:
    """What is seen in the middle of a screenshot, and what of (H, W, 3) should be there: (side, side, 3) each."""
    ranges = [np.arange(length // 2 - side // 2, length // 2 + side // 2) for length in seen.shape[:2]]
    at = [
        np.floor((run + 0.5 - round(length / 2)) / zoom + place).astype(int)
        for run, length, place in zip(ranges, seen.shape[:2], (y, x), strict=True)
    ]
    return seen[np.ix_(*ranges)], pixels[np.ix_(*at)]


def status(browser) -> str:
    """What the page says of the pixel under the pointer, or in the middle."""
    return " ".join(browser.value("[...byId('status').childNodes].map((part) => part.textContent).join(' ')").split())


# ---------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(
    ("zoom", "number", "x", "y"),
    [(4, 0, 512, 512), (1, 0, 1024, 800), (1, 0, 1536, 1024), (0.5, 1, 1024, 800), (0.25, 2, 1024, 800)],
)
def test_the_image_is_shown_pixel_by_pixel_across_the_borders_of_tiles(browser, page, zoom, number, x, y, ratio):
    browser.go(url(page, x=x, y=y, zoom=zoom / ratio, show="image"), size=(900 // ratio, 700 // ratio), ratio=ratio)
    step = 2**number
    place = {"x": x / step, "y": y / step, "zoom": max(1, zoom)}
    found, wanted = middle_of(browser.screenshot(), level(page, "image", number, SIZE), **place)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(("zoom", "number"), [(3, 0), (1, 0), (0.5, 1)])
def test_labels_are_shown_in_the_colours_of_their_classes(browser, page, zoom, number):
    browser.go(url(page, x=512, y=1024, zoom=zoom, show="truth", opacity=1), size=(900, 500))
    table = np.array([BACKGROUND, BACKGROUND, *colours(5)[1:]])  # class 0 is transparent
    step = 2**number
    place = {"x": 512 / step, "y": 1024 / step, "zoom": max(1, zoom)}
    found, wanted = middle_of(browser.screenshot(), table[level(page, "truth", number, SIZE)], **place)
    assert np.array_equal(found, wanted)


@pytest.fixture(scope="module")
def flat_page(tmp_path_factory):
    flat = np.empty((3, 1600, 1700), np.uint8)
    flat[:] = np.array([200, 90, 30])[:, None, None]
    labels = np.ones(flat.shape[1:], np.uint8)
    labels[5::512, 7::512] = 0  # so that every tile has two numbers, and so a file
    return write(tmp_path_factory.mktemp("flat"), flat, prediction=labels)


@pytest.mark.parametrize(("zoom", "ratio"), [(0.37, 1.0), (0.731, 1.0), (1.3, 1.0), (0.61, 1.5), (2.17, 2.0), (0.9999, 1.25)])
def test_a_flat_image_has_no_seams(browser, flat_page, zoom, ratio):
    browser.go(url(flat_page, x=850.3, y=800.7, zoom=zoom, show="image"), size=(600, 500), ratio=ratio)
    assert np.unique(_inside(browser, zoom, ratio), axis=0).tolist() == [[200, 90, 30]]
    browser.press("2")
    found, counts = np.unique(_inside(browser, zoom, ratio), axis=0, return_counts=True)
    assert len(found) <= 2 and counts.max() > 0.999 * counts.sum()  # the few are of class 0


def _inside(browser, zoom: float, ratio: float) -> np.ndarray:
    """The pixels of the image, (N, 3), without what the page has over it: buttons, the scale, the line at the bottom."""
    seen, inner = browser.screenshot(), []
    for length, extent in zip(seen.shape, (1600, 1700), strict=False):
        half = min(length / 2 - 80 * ratio, extent / 2 * zoom * ratio - 3)
        inner.append(slice(int(length / 2 - half), int(length / 2 + half)))
    return seen[tuple(inner)].reshape(-1, 3)


def test_one_wrong_pixel_is_seen_from_far(browser, tmp_path):
    labels = np.zeros((4100, 3000), np.uint8)
    other = labels.copy()
    other[3001, 1501] = 1
    page = write(tmp_path, np.zeros((1, *labels.shape), np.uint8), prediction=labels, truth=other)
    browser.go(url(page, show="image,disagreement"), size=(420, 700))
    seen = browser.screenshot()[:650].astype(int)
    assert ((seen[..., 0] > 80) & (seen[..., 1] < 60)).sum() >= 1


def test_pixels_without_data_show_the_background(browser, tmp_path):
    image = np.full((1, 600, 600), 0.5, np.float32)
    image[0, :300] = np.nan
    page = write(tmp_path, image, settings=shown(limits=(0.0, 1.0)))
    browser.go(url(page, x=300, y=300, zoom=1))
    seen = browser.screenshot()
    assert (seen[200, 300] == BACKGROUND).all() and (seen[450, 300] == 128).all()


def test_a_damaged_tile_leaves_the_coarser_one(browser, tmp_path):
    page = write(tmp_path, IMAGE)
    (page / "tiles/0/image/0-0/0/0_0.webp").write_bytes(b"no picture")
    browser.go(url(page, x=256, y=256, zoom=1))
    coarsest = level(page, "image", 2, SIZE).repeat(4, 0).repeat(4, 1)
    found, wanted = middle_of(browser.screenshot(), coarsest, x=256, y=256, zoom=1)
    assert np.array_equal(found, wanted)


# ---------------------------------------------------------------------------------------------- what the page says


@pytest.mark.parametrize(("x", "y"), [(0, 0), (1203, 1000), (1699, 1300), (512, 511)])
@pytest.mark.parametrize("zoom", [0.2, 1, 8])
def test_the_classes_of_a_pixel_are_those_of_the_files_at_any_zoom(browser, page, x, y, zoom):
    browser.go(url(page, x=x + 0.5, y=y + 0.5, zoom=zoom))
    names = [CLASSES[labels[y, x]] for labels in (PREDICTION, TRUTH)]
    wanted = f"x {x} y {y} prediction {names[0]} truth {names[1]}"
    assert status(browser) == (wanted if names[0] == names[1] else f"{wanted} differs")


def test_what_is_under_the_pointer_is_said(browser, page):
    browser.go(url(page, x=1203, y=1000, zoom=4))
    browser.tell("Input.dispatchMouseEvent", type="mouseMoved", x=450 + 4 * 7 + 1, y=350 - 4 * 5 + 1)
    browser.settle()
    assert status(browser).startswith("x 1210 y 995 ")
    browser.go(url(page, x=0, y=0, zoom=4))
    browser.tell("Input.dispatchMouseEvent", type="mouseMoved", x=440, y=350)
    browser.settle()
    assert status(browser) == "outside of the image"


UTM = {"affine": [[0, 10, 600_000], [-10, 0, 5_700_000], [0, 0, 1]], "world": "UTM 32N", "spacing": [10, 10], "unit": "m"}
SMALL = {"spacing": [0.5, 0.25], "unit": "um"}


@pytest.mark.parametrize(("about", "said"), [(UTM, "601000, 5698000 m UTM 32N"), (SMALL, "25.00, 100.00 µm"), ({}, "")])
def test_the_place_in_the_world_is_that_of_the_pixels_centre(browser, page, about, said):
    browser.go(url(page, x=100.5, y=200.5, zoom=1))
    browser.value(f"Object.assign(scene, {json.dumps(about)}); draw()")
    assert status(browser).startswith(" ".join(["x 100 y 200", said, "prediction"]).replace("  ", " "))


def test_the_legend_and_the_worst_windows_are_there_and_names_are_no_markup(browser, page):
    browser.go(url(page, panel=1))
    cells = "(one) => [...one.children].map((cell) => cell.textContent)"
    rows = browser.value(f"[...document.querySelectorAll('#legend tr')].map({cells})")
    assert rows[0] == ["", "predicted", "truth", "IoU"] and [row[0] for row in rows[1:]] == list(CLASSES)
    shares = [f"{100 * (TRUTH == number).mean():.1f} %" for number in range(5)]
    assert [row[2] for row in rows[1:]] == shares and browser.value("document.querySelectorAll('#legend b').length") == 0
    assert browser.value("byId('wrong').textContent").startswith("1 of 2,211,700 compared pixels differ")
    assert browser.value("byId('worst').textContent") == "x 1280, y 7681 px, 0.0 %"
    browser.value("document.querySelector('#worst a').click()")
    browser.settle()
    assert browser.value("at") == [0.5, 768, 1280] and browser.value("shown.has('disagreement')")


def test_a_class_can_be_hidden(browser, page):
    browser.go(url(page, panel=1, x=0, y=0, zoom=1, show="truth", opacity=1))
    assert "water" == CLASSES[TRUTH[10, 90]]
    browser.value("at = [0.5, 10.5, 90.5]; changed()")
    browser.settle()
    middle = browser.value("[canvas.width / 2, canvas.height / 2].map(Math.floor)")
    assert (browser.screenshot()[middle[1], middle[0]] == colours(3)[2]).all()
    browser.value("document.querySelectorAll('#legend input')[2].click()")
    browser.settle()
    assert (browser.screenshot()[middle[1], middle[0]] == BACKGROUND).all()


# ---------------------------------------------------------------------------------------------- keys, fingers, panes


def test_keys_change_layers_and_the_view(browser, page):
    browser.go(url(page))

    def layers() -> str:
        return browser.value("[...shown].sort().join(' ')")

    found = [layers()]
    for keys in (" ", " ", "4", "1"):
        browser.press(keys)
        found.append(layers())
    assert found == [
        "image prediction", "image truth", "image prediction", "disagreement image prediction", "disagreement prediction",
    ]  # fmt: skip
    browser.press("s")
    assert browser.value("panes().map((pane) => pane.title)") == ["prediction", "truth"]
    browser.press("s")
    before = browser.value("zoom")
    browser.press("+")
    assert browser.value("zoom") == pytest.approx(1.5 * before)
    browser.press("p")
    browser.press("ArrowRight")
    assert browser.value("zoom") == 1 and browser.value("at") == [0.5, 650.5, 850 + 90]
    browser.press("m")
    assert browser.value("innerWidth - canvas.clientWidth") == 320


def test_dragging_and_the_wheel_move_the_image_under_the_pointer(browser, page):
    browser.go(url(page, x=850, y=650, zoom=1))

    def under(x, y):
        return browser.value(f"positionAt(panes()[0], {x}, {y}).slice(1)")

    start = under(100, 200)
    for kind, x, y in (("mousePressed", 100, 200), ("mouseMoved", 160, 230), ("mouseReleased", 160, 230)):
        browser.tell("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
    assert under(160, 230) == pytest.approx(start, abs=1e-9)
    browser.tell("Input.dispatchMouseEvent", type="mouseWheel", x=160, y=230, deltaX=0, deltaY=-120)
    browser.settle()
    assert under(160, 230) == pytest.approx(start, abs=1e-9) and browser.value("zoom") > 1.2


def test_two_fingers_zoom_and_keep_what_is_under_them(browser, page):
    browser.go(url(page, x=850, y=650, zoom=1), size=(420, 800), touch=True)
    assert browser.value("byId('panel').classList.contains('closed')")

    def touch(kind, *points):
        places = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        browser.tell("Input.dispatchTouchEvent", type=kind, touchPoints=places)

    start = browser.value("positionAt(panes()[0], 100, 300).slice(1)")
    touch("touchStart", (100, 300))
    touch("touchStart", (100, 300), (200, 300))
    for right in (220, 260, 300):
        touch("touchMove", (100, 300), (right, 300))
    touch("touchEnd")
    browser.settle()
    assert browser.value("zoom") == pytest.approx(2) and browser.value("fingers.size") == 0
    assert browser.value("positionAt(panes()[0], 100, 300).slice(1)") == pytest.approx(start, abs=1e-9)


def test_side_by_side_and_the_cut_are_drawn(browser, page):
    _, (cut,), columns = data(page)["scenes"][0]["cuts"]
    assert (cut, columns) == (656, [])
    browser.go(url(page, x=850, y=cut, zoom=1, show="", beside=1, cut=1, opacity=1))
    seen = browser.screenshot()
    assert (np.delete(seen[seen.shape[0] // 2], 450, axis=0) == CUT).all()
    left, right = seen[400:600, 1:450], seen[400:600, 451:]  # without the line between them
    assert np.array_equal(left, right)  # both labels are the same there, at the same place


def test_a_volume_is_upright_and_its_planes_meet_in_one_place(browser, tmp_path):
    volume = np.zeros((1, 8, 20, 30), np.uint8)
    volume[0, 6, 4, 9] = 255
    page = write(tmp_path, volume, settings=shown(planes=True))
    browser.go(url(page, planes=1, z=6.5, y=4.5, x=9.5, zoom=4))
    assert browser.value("panes().length") == 3
    seen = browser.screenshot()
    for pane in browser.value("panes()"):
        row, column = pane["top"] + pane["height"] // 2 + 1, pane["left"] + pane["width"] // 2 + 1
        assert (seen[row, column] == 255).all(), pane
    ras = "[[0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]]"
    browser.value(f"Object.assign(scene, {{affine: {ras}, world: 'RAS', spacing: [2, 1, 1]}})")
    browser.value("all = false; at = [6.5, 10, 15]; changed()")
    browser.settle()
    assert browser.value("[0, 1, 2].map(leads)") == ["S", "A", "R"] and browser.value("[0, 1, 2].map(sign)") == [-1, -1, -1]
    seen, pane = browser.screenshot(), browser.value("panes()[0]")
    row, column = (pane["top"] + pane["height"] // 2 + 4 * (10 - 5) + 1, pane["left"] + pane["width"] // 2 + 4 * (15 - 10) + 1)
    assert (seen[row, column] == 255).all()
    browser.value("plane = 1; at = [4, 4.5, 15]; changed()")
    browser.settle()
    seen, pane = browser.screenshot(), browser.value("panes()[0]")
    row = pane["top"] + pane["height"] // 2 + 8 * (4 - 7) + 2  # a slice is twice as thick as a row
    assert (seen[row, column] == 255).all() and browser.value("scale(0)") == 8


def test_a_web_server_shows_the_same(browser, page):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=page))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        of_disk = url(page, x=1203.5, y=1000.5, zoom=1)
        browser.go(of_disk)
        seen = browser.screenshot()
        browser.go(of_disk.replace(f"file://{page}", f"http://127.0.0.1:{server.server_port}"))
        assert np.array_equal(browser.screenshot(), seen) and status(browser).endswith("differs")
    finally:
        server.shutdown()
        server.server_close()


def test_the_page_names_nothing_outside_of_its_folder(page):
    for path in page.iterdir():
        if path.suffix in (".html", ".css", ".js"):
            assert "//" not in path.read_text().replace("// ", "").replace("//\n", ""), path
