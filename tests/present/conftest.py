from tests.javascript import node  # noqa: F401  # a fixture
