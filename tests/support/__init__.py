"""What tests of several folders share: real servers to run against."""
