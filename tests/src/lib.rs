//! Whole-system tests of kvtide. The tests lie in `tests/`, one file for each behaviour.
#![forbid(unsafe_code)]
