"""Whether a JPEG or WebP file says that its pixels do not stand upright.

Source: JPEG markers, ITU-T T.81 (1992), annex B; Exif, CIPA DC-008 (2019), section 4.5 and 4.6; TIFF 6.0, section 2;
WebP's chunks, RFC 9649 (2024), section 2.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

_EXIF, _ORIENTATION, _SHORT = b"Exif\0\0", 0x0112, 3
_APP1, _FRAMES = 0xE1, {0xC0, 0xC1, 0xC2, 0xDA}  # with or before these the pixels begin


def is_upright(data: memoryview) -> bool:
    """Says whether a JPEG file has no Exif orientation, or that of pixels which stand upright.

    **Arguments:** `data`: the file, as bytes.

    **Returns:** False also where the file is not understood, so that a decoder of all of Exif is asked.
    """
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF:
        kind, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if kind in _FRAMES:
            return True
        segment = data[place + 4 : place + 2 + length]
        if kind == _APP1 and segment[:6].tobytes() == _EXIF:
            return _orientation(segment[6:]) == 1
        place += 2 + length
    return False


def webp_orientation(data: memoryview) -> int:
    """Returns how a WebP file says that its pixels are turned, 1 to 8 as Exif numbers it; 1 where it says nothing.

    **Arguments:** `data`: the file, as bytes. Its Exif data may begin as those of a JPEG file do, or with the TIFF.
    """
    place = 12
    while place + 8 <= len(data):
        length = int.from_bytes(data[place + 4 : place + 8], "little")
        if data[place : place + 4].tobytes() == b"EXIF":
            chunk = data[place + 8 : place + 8 + length]
            found = _orientation(chunk[6:] if chunk[:6].tobytes() == _EXIF else chunk)
            return found if 1 <= found <= 8 else 1
        place += 8 + length + length % 2
    return 1


def upright(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Turns and mirrors the pixels of an image so that they stand upright.

    **Arguments:** `image`: uint8 `[h, w, 3]`. `orientation`: 1 to 8, as Exif numbers it.
    """
    turned = image.swapaxes(0, 1) if orientation > 4 else image
    down, right = (-1 if orientation in of else 1 for of in ((3, 4, 7, 8), (2, 3, 6, 7)))
    return np.ascontiguousarray(turned[::down, ::right])


def _orientation(tiff: memoryview) -> int:
    order: Literal["little", "big"] = "little" if tiff[:2].tobytes() == b"II" else "big"

    def number(place: int, length: int) -> int:
        return int.from_bytes(tiff[place : place + length], order)

    first = number(4, 4)
    for place in range(first + 2, first + 2 + 12 * number(first, 2), 12):
        if number(place, 2) == _ORIENTATION:
            return number(place + 8, 2) if number(place + 2, 2) == _SHORT else 0
    return 1
