"""HTTP/2 without TLS and with prior knowledge, as a gateway connects to pods: one request on one connection.

Of HPACK it supports only the headers that it sends, and a status of 200 in one octet.
"""

import socket
import struct

DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
END_STREAM, ACK, END_HEADERS = 1, 1, 4
STATUS_200 = 0x88


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def text(of):
    """Encodes a string without compression; all strings here are short."""
    assert len(of) < 127
    return bytes([len(of)]) + of.encode()


def literal(name, value):
    """Encodes a header that is not added to the dynamic table."""
    return b"\x00" + text(name) + text(value)


def read(stream, n):
    got = b""
    while len(got) < n:
        piece = stream.recv(n - len(got))
        assert piece, "the connection ended in mid-frame: it speaks no HTTP/2"
        got += piece
    return got


def post(host, port, path, body, patience_s):
    """Returns (whether the status is 200, the answer's body)."""
    # :method POST and :scheme http are in HPACK's own table, and so are the names of :path and :authority.
    head = b"\x83\x86\x04" + text(path) + b"\x01" + text(f"{host}:{port}")
    head += literal("content-type", "application/json") + literal("content-length", str(len(body)))
    with socket.create_connection((host, port), timeout=patience_s) as stream:
        stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
        stream.sendall(frame(HEADERS, END_HEADERS, 1, head) + frame(DATA, END_STREAM, 1, body))
        is_200, answer = False, b""
        while True:
            start = read(stream, 9)
            kind, flags = start[3], start[4]
            payload = read(stream, int.from_bytes(start[:3], "big"))
            if kind in (SETTINGS, PING) and not flags & ACK:
                stream.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
            if int.from_bytes(start[5:], "big") != 1:
                continue
            assert kind in (DATA, HEADERS), f"a frame of kind {kind} ends the stream"
            if kind == HEADERS and not answer:
                is_200 = payload[0] == STATUS_200
            elif kind == DATA:
                answer += payload
            if flags & END_STREAM:
                return is_200, answer
