"""Translate pip's settings for uv: `pip config list` on standard input, NAME=VALUE lines for uv's environment out.

Exit status 1, and nothing but the reason, where pip has a setting that uv has no equal of: then pip must do the work.
"""

import ast
import re
import sys

#: What pip calls it -> uv's variable, whether it is a list, and what stands between its items there.
NAMES = {
    "index-url": ("UV_DEFAULT_INDEX", False, ""),
    "extra-index-url": ("UV_INDEX", True, " "),
    "find-links": ("UV_FIND_LINKS", True, ","),
    "no-index": ("UV_NO_INDEX", False, ""),
    "cert": ("SSL_CERT_FILE", False, ""),
    "timeout": ("UV_HTTP_TIMEOUT", False, ""),
    "default-timeout": ("UV_HTTP_TIMEOUT", False, ""),
    "proxy": ("ALL_PROXY", False, ""),
    "trusted-host": ("UV_INSECURE_HOST", True, " "),
    "no-cache-dir": ("UV_NO_CACHE", False, ""),
}
#: What changes nothing in the result.
OF_NO_MATTER = {
    "disable-pip-version-check", "no-input", "progress-bar", "quiet", "root-user-action", "no-color", "cache-dir",
    "no-python-version-warning", "retries", "prefer-binary", "verbose",
}  # fmt: skip


def main() -> None:
    """Read, translate, write."""
    found: dict[str, list[str]] = {}
    # Files first, the environment last and strongest, as pip prints them.
    for line in sorted(sys.stdin, key=lambda line: line.startswith(":env:")):
        match = re.fullmatch(r"(\S+?)\.([\w-]+)=(.*)", line.strip())
        if match is None:
            sys.exit(f"a setting of pip that cannot be read: {line.strip()}")
        section, name, value = match.groups()
        if section not in ("global", "install", ":env:") or name in OF_NO_MATTER:
            continue
        if name not in NAMES:
            sys.exit(f"pip's setting {section}.{name} has no equal in uv")
        found[name] = str(ast.literal_eval(value)).split()
    for name, items in found.items():
        variable, is_list, between = NAMES[name]
        if not is_list and len(items) != 1:
            sys.exit(f"pip's setting {name} has {len(items)} values")
        print(f"{variable}={between.join(items)}")


if __name__ == "__main__":
    main()
