"""List the links out of the built book, and ask each whether it still leads somewhere.

  python book/check_links.py [--list]     (`make links` builds the book first)

Prints a line an address: what its server answered, and the pages that name it. Ends with 1 if an
address is gone: its server says so (404, 410), or there is no such server (without a network, there
is none). Any other refusal (403, 429, no answer in time) is printed and no more: many servers
refuse whoever is not a browser.
"""

import argparse
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urldefrag
from urllib.request import Request, urlopen

SITE = Path(__file__).resolve().parents[1] / "_build" / "html"
HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; check_links)"}
TIMEOUT = 20  # seconds
GONE = {404, 410}
REFUSES_HEAD = {400, 403, 405, 501}


class Links(HTMLParser):
    """Collect the addresses outside the site that a page's links name."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def handle_starttag(self, tag, attributes):
        address = dict(attributes).get("href") or ""
        if tag == "a" and address.startswith(("https://", "http://")):
            self.found.add(urldefrag(address).url)


def outside_links(site: Path) -> dict[str, list[str]]:
    """Map each outside address to the pages that link to it."""
    pages = {}
    for page in sorted(site.rglob("*.html")):
        links = Links()
        links.feed(page.read_text(encoding="utf-8"))
        for address in links.found:
            pages.setdefault(address, []).append(page.relative_to(site).as_posix())
    return dict(sorted(pages.items()))


def ask(address: str, method: str = "HEAD") -> tuple[str, bool]:
    """Ask for an address: the answer in words, and whether it is gone."""
    try:
        with urlopen(Request(address, headers=HEADERS, method=method), timeout=TIMEOUT) as answer:
            return str(answer.status), False
    except HTTPError as error:
        if method == "HEAD" and error.code in REFUSES_HEAD | GONE:
            return ask(address, "GET")
        return str(error.code), error.code in GONE
    except URLError as error:
        no_such_server = getattr(error.reason, "errno", None) == socket.EAI_NONAME
        return str(error.reason), no_such_server
    except (OSError, HTTPException) as error:
        return str(error) or type(error).__name__, False


def main(site: Path, only_list: bool = False) -> int:
    """Print all outside links with their answers; returns how many are gone."""
    pages = outside_links(site)
    with ThreadPoolExecutor(8) as pool:
        answers = [("", False) for _ in pages] if only_list else list(pool.map(ask, pages))
    for (address, where), (words, _) in zip(pages.items(), answers, strict=True):
        print(f"{words:5} {address}  ({', '.join(where)})")
    gone = sum(is_gone for _, is_gone in answers)
    print(f"{len(pages)} addresses, {gone} of them gone")
    if 0 < gone == len(pages):
        print("All of them: is there a network here?")
    return gone


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="ask nobody")
    if not SITE.is_dir():
        sys.exit("The book is not built: make book")
    sys.exit(bool(main(SITE, parser.parse_args().list)))
