//! Inputs of an operator.

/// How often an input may be given, and its purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arity {
    /// Exactly once.
    One,
    /// Once or not at all.
    Optional,
    /// Any number of times, at least once; last in the list.
    Variadic,
    /// A constant that shapes the computation. It becomes the attribute of the input's name, and may be omitted.
    Shaping,
    /// Like `Shaping` if it is a constant; any other value is ignored.
    Hint,
}

/// An input of an operator.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// ONNX's name for it.
    pub name: &'static str,
    /// How often it may be given.
    pub arity: Arity,
}

impl Input {
    /// True if the input becomes an attribute; data inputs stay values.
    pub fn shapes(&self) -> bool {
        matches!(self.arity, Arity::Shaping | Arity::Hint)
    }
}

/// A required data input.
pub const fn one(name: &'static str) -> Input {
    Input { name, arity: Arity::One }
}

/// An optional data input.
pub const fn optional(name: &'static str) -> Input {
    Input { name, arity: Arity::Optional }
}

/// A repeated data input.
pub const fn variadic(name: &'static str) -> Input {
    Input { name, arity: Arity::Variadic }
}

/// A constant input that becomes the attribute of its name.
pub const fn shaping(name: &'static str) -> Input {
    Input { name, arity: Arity::Shaping }
}

/// An input that becomes the attribute of its name if it is a constant, and is ignored otherwise.
pub const fn hint(name: &'static str) -> Input {
    Input { name, arity: Arity::Hint }
}
