# LEAD: read LEAD_NOTE.md in this folder before going on with this file.
"""JPEG images decoded, cropped and resized in one go, whole windows of them in one call without the GIL.

Between the coefficients of a JPEG file and the pixels of a resized image all steps are linear, but for the rounding and
clipping of pixels that nobody will see. So the order is chosen by cost: transform and filter along rows, then along
columns, on brightness and color planes of their own size, and only at the end, at the new size, to RGB. What remains
is decoding the Huffman codes. Nothing outside the crop is transformed, nothing below it decoded.

The filter is that of `resize`. Subsampled color planes get a triangle with the variance of that filter and of the
interpolation that decoders use together.

Source: Arai, Agui, Nakajima, "A fast DCT-SQ scheme for images" (Trans. IEICE E71, 1988); ITU-T T.81 (1992), annex A.
"""

from typing import Any

import numpy as np

from braidax.data.compiled import kernel
from braidax.data.images.jpeg_entropy import (
    BLOCK,
    LEFT,
    LOOK,
    NUM_STATES,
    PLACES,
    POSITION,
    SEGMENT,
    STOP,
    build_tables,
    decode_row,
    ends_well,
    unstuff,
)
from braidax.data.images.jpeg_header import (
    AC,
    COMPONENTS,
    DC,
    H_MAX,
    HEIGHT,
    NUM_FIELDS,
    ORIENTATION,
    QUANT,
    RESTART,
    SCAN,
    V_MAX,
    WIDTH,
    H,
    V,
    read_header,
)
from braidax.data.images.jpeg_planes import add_blocks, fill_taps, scaled_steps, write_pixels

_MAX_SEGMENTS = 4096


@kernel
def sizes(data: Any, starts: Any, found: Any) -> None:
    """Finds the upright sizes of images.

    **Arguments:** `data`: uint8, the files one behind the other. `starts`: int64 `[n + 1]`, their borders. `found`:
    int64 `[n, 2]`, filled with height and width, or 0 for files that `decode` does not decode.
    """
    head, quant, codes = np.empty(NUM_FIELDS, np.int64), np.empty((4, 64), np.float32), np.empty((4, 272), np.uint8)
    for n in range(len(found)):
        found[n] = 0
        if read_header(data, starts[n], starts[n + 1], head, quant, codes):
            turned = head[ORIENTATION] > 4
            found[n, 0] = head[WIDTH] if turned else head[HEIGHT]
            found[n, 1] = head[HEIGHT] if turned else head[WIDTH]


@kernel
def decode(data: Any, starts: Any, boxes: Any, mirrored: Any, out: Any, done: Any) -> None:
    """Decodes a window of images.

    **Arguments:** `data`, `starts`: as `sizes`. `boxes`: int64 `[n, 4]`, top, left, height and width of what becomes
    the target, upright; height 0 for the whole image. `mirrored`: bool `[n]`, whether left becomes right. `out`: uint8
    `[n, h, w, 3]`, filled. `done`: bool `[n]`, which images to decode, and when the call returns, which
    are decoded: those that are not ours or look damaged are not, and their place in `out` is not filled.
    """
    head, quant, codes = np.empty(NUM_FIELDS, np.int64), np.zeros((4, 64), np.float32), np.zeros((4, 272), np.uint8)
    looks, known = np.zeros(4 << LOOK, np.uint64), np.full((4, 272), 255, np.uint8)
    limits, offsets = np.zeros((4, 18), np.int64), np.zeros((4, 18), np.int64)
    tables = (looks, codes, limits, offsets, PLACES)
    longest = np.int64(0)
    for n in range(len(done)):
        longest = max(longest, starts[n + 1] - starts[n])
    packed = np.empty(longest + 8 * _MAX_SEGMENTS + 1024, np.uint8)
    segments, steps = np.empty((_MAX_SEGMENTS, 2), np.int64), np.empty((4, 64), np.float32)
    planes = np.empty((3, (out.shape[1] + 8) * (out.shape[2] + 8)), np.float32)
    coefficients, work = np.empty(0, np.int16), np.empty(0, np.float32)
    for n in range(len(done)):
        wanted, done[n] = done[n], False
        if not wanted or not read_header(data, starts[n], starts[n + 1], head, quant, codes):
            continue
        count = unstuff(data, head[SCAN], starts[n + 1], packed, segments)
        if count == 0 or not _inside(boxes[n], head):
            continue
        if not np.array_equal(known, codes):
            build_tables(codes, looks, limits, offsets)
            known[:] = codes
        num_mcus = -(-head[WIDTH] // (8 * head[H_MAX]))
        num_blocks = num_mcus * 6  # in the largest unit
        if len(coefficients) < num_blocks * BLOCK:
            work, coefficients = np.empty(num_blocks * 64, np.float32), np.empty(num_blocks * BLOCK, np.int16)
        scaled_steps(quant, steps)
        scan, room = (packed, segments[:count], head[RESTART]), (coefficients, work, planes)
        done[n] = _decode_image(scan, (head, steps), tables, room, boxes[n], mirrored[n], out[n])


@kernel
def _inside(box: Any, head: Any) -> bool:
    turned = head[ORIENTATION] > 4
    height, width = (head[WIDTH], head[HEIGHT]) if turned else (head[HEIGHT], head[WIDTH])
    if box[2] == 0:
        return True
    return 0 <= box[0] <= height - box[2] and 0 <= box[1] <= width - box[3] and box[2] > 0 and box[3] > 0


@kernel
def _decode_image(scan: Any, header: Any, tables: Any, room: Any, box: Any, mirrored: bool, out: Any) -> bool:
    head, steps = header
    segments = scan[1]
    coefficients, work, planes = room
    x0, w, new_w, y0, h, new_h, pixel_steps = _as_stored(head, box, mirrored, out.shape)
    x_taps = (fill_taps(x0, w, new_w, 1), fill_taps(x0, w, new_w, head[H_MAX]))
    y_taps = (fill_taps(y0, h, new_h, 1), fill_taps(y0, h, new_h, head[V_MAX]))
    num_mcus = -(-head[WIDTH] // (8 * head[H_MAX]))
    num_rows = -(-(y0 + h) // (8 * head[V_MAX]))
    planes[: head[COMPONENTS], : new_h * ((new_w + 7) // 8) * 8] = 0
    luma = num_mcus * head[H_MAX] * head[V_MAX] * BLOCK
    origins = np.array([0, luma, luma + num_mcus * BLOCK])
    plan = _plan(head, origins, num_mcus)
    state = np.zeros(NUM_STATES, np.int64)
    state[STOP], state[LEFT] = segments[0, 1], head[RESTART]
    for row in range(num_rows):
        coefficients[:] = 0
        if not decode_row(num_mcus, scan, state, plan, tables, coefficients):
            return False
        for c in range(head[COMPONENTS]):
            subsampled = 1 if c else 0
            for i in range(head[V + c]):
                add_blocks(
                    coefficients[origins[c] + i * num_mcus * head[H + c] * BLOCK :],
                    steps[head[QUANT + c]],
                    x_taps[subsampled],
                    y_taps[subsampled],
                    (row * head[V + c] + i) * 8,
                    work,
                    planes[c],
                )
    if num_rows * 8 * head[V_MAX] >= head[HEIGHT]:
        if state[SEGMENT] + 1 != len(segments) or not ends_well(state):
            return False
    elif state[POSITION] > state[STOP]:
        return False
    write_pixels(planes, head[COMPONENTS] == 3, (new_h, new_w), pixel_steps, out.reshape(-1))
    return True


@kernel
def _plan(head: Any, origins: Any, num_mcus: int) -> Any:
    """Returns the blocks of a unit, as `decode_row` takes them."""
    plan, number = np.empty((6, 5), np.uint64), 0
    for c in range(head[COMPONENTS]):
        for row in range(head[V + c]):
            for column in range(head[H + c]):
                plan[number, 0], plan[number, 1], plan[number, 2] = c, head[DC + c] << LOOK, (head[AC + c] + 2) << LOOK
                plan[number, 3] = origins[c] + (row * num_mcus * head[H + c] + column) * BLOCK
                plan[number, 4] = head[H + c] * BLOCK
                number += 1
    return plan[:number]


@kernel
def _as_stored(head: Any, box: Any, mirrored: bool, shape: Any) -> Any:
    """Returns the crop and the target as the file stores them, before they are turned upright.

    That is start, length and new length along its rows, the same along its columns, and where its first pixel goes,
    with the steps to the next row and pixel.
    """
    kind = head[ORIENTATION]
    turned, back_x, back_y = kind > 4, kind in (2, 3, 7, 8), kind in (3, 4, 6, 7)
    top, left, height, width = box[0], box[1], box[2], box[3]
    if height == 0:
        height, width = (head[WIDTH], head[HEIGHT]) if turned else (head[HEIGHT], head[WIDTH])
    x0, w, y0, h = (top, height, left, width) if turned else (left, width, top, height)
    new_w, new_h = (shape[0], shape[1]) if turned else (shape[1], shape[0])
    x_step, y_step = (shape[1] * 3, 3) if turned else (3, shape[1] * 3)
    x0 = head[WIDTH] - x0 - w if back_x else x0
    y0 = head[HEIGHT] - y0 - h if back_y else y0
    back_x, back_y = back_x != (mirrored and not turned), back_y != (mirrored and turned)
    first = (new_w - 1) * x_step * back_x + (new_h - 1) * y_step * back_y
    return x0, w, new_w, y0, h, new_h, (first, -y_step if back_y else y_step, -x_step if back_x else x_step)
