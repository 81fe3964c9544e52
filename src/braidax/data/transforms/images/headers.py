"""How many pixels an encoded image promises, read from its header before anything is decoded.

Sources: JPEG, ITU-T T.81 (1992), annex B.2.2; PNG, ISO/IEC 15948 (2003), section 11.2.2; WebP, RFC 9649 (2024),
sections 2.5 to 2.7; BMP, the Windows bitmap headers of 12 and of 40 bytes and more.
"""

_NO_FRAMES = {0xC4, 0xC8, 0xCC}  # markers among those of frames that begin something else


def promised_size(data: memoryview) -> tuple[int, int]:
    """Returns height and width of a JPEG, PNG, WebP or BMP file, `(0, 0)` where the header does not tell.

    **Arguments:** `data`: the file, as bytes.
    """
    head = data[:16].tobytes()
    if head.startswith(b"\xff\xd8"):
        return _jpeg(data)
    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(data) >= 24:
        return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
    if head.startswith(b"BM") and len(data) >= 26:
        size = 2 if int.from_bytes(data[14:18], "little") == 12 else 4
        width, height = (int.from_bytes(data[at : at + size], "little", signed=size == 4) for at in (18, 18 + size))
        return abs(height), abs(width)
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP" and len(data) >= 30:
        return _webp(data)
    return 0, 0


def _jpeg(data: memoryview) -> tuple[int, int]:
    place = 2
    while place + 9 <= len(data) and data[place] == 0xFF:
        kind, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if 0xC0 <= kind <= 0xCF and kind not in _NO_FRAMES:
            height, width = (int.from_bytes(data[at : at + 2], "big") for at in (place + 5, place + 7))
            return height, width
        place += 1 if kind == 0xFF else 2 + length  # a marker may be filled up with 0xFF
    return 0, 0


def _webp(data: memoryview) -> tuple[int, int]:
    kind = data[12:16].tobytes()
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[27:30], "little"), 1 + int.from_bytes(data[24:27], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    if kind == b"VP8 ":
        width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
        return height, width
    return 0, 0
