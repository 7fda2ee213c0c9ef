from kvikio import is_to


def get(name: str) -> bool:
    assert name == "is_gds_available"
    return is_to("gds")
