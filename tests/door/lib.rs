//! The library as other languages load it: the functions of the door that is among the features.

pub use plimsoll::*;
