import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=1000, help="how many random cases the losslessness test tries")
