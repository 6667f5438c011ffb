//! The ONNX text syntax: [`parse`] reads what `onnx.parser` reads, [`print()`] writes what it reads.
//!
//! ```text
//! model    ::= header? graph function*
//! header   ::= '<' (key ':' value),* '>'
//! graph    ::= name '(' input,* ')' '=>' '(' value,* ')' ('<' (value | initializer),* '>')? nodes
//! function ::= header? name ('<' (name | attr),* '>')? '(' value,* ')' '=>' '(' value,* ')' ('<' value,* '>')? nodes
//! nodes    ::= '{' node* '}'
//! node     ::= ('[' name ']')? name,* '=' (domain '.')* op (':' overload)? attrs? '(' name,* ')' attrs?
//! attrs    ::= '<' attr,* '>'
//! attr     ::= name (':' kind)? '=' ('@' name | item | '[' item,* ']')
//! item     ::= number | string | tensor | type | graph
//! tensor   ::= type name? '='? data
//! value    ::= type? name
//! input    ::= value ('=' data)?
//! initializer ::= value '=' data
//! data     ::= '{' (number | string),* '}' | '[' (string ':' string),* ']'
//! type     ::= elem ('[' dim,* ']')? | ('seq' | 'map' | ...) '(' type,* ')'
//! dim      ::= '?' | name | number
//! name     ::= identifier | string
//! ```
//! `float` is a scalar and `float[]` has an unknown rank, so that no tensor can be one. Floats of 16 bits and fewer are
//! written as their bits, external data as `["location": "w.bin", ...]`. In a string, `\` takes the character after it
//! as it is. `#` starts a comment.
//!
//! Beyond `onnx.parser`, so that every model can be printed and read back: any name, domain or operator may be quoted,
//! lists of tensors, graphs and types keep their elements, `undefined` is an element type, and wherever there is a list
//! it may be empty. Stricter: a tensor has as many values as its shape, each in the range of its type.

use super::proto::*;
use crate::error::{Error, Result};
use bytes::Bytes;
use std::fmt::{self, Write};
use std::path::Path;
use std::str::FromStr;

/// How deep graphs and types may nest.
const MAX_DEPTH: usize = 32;

/// Spaces that a level of the printed text is indented by.
const INDENT: usize = 3;

/// Columns after which lists are wrapped.
const WIDTH: usize = 110;

/// The name of each attribute type, and of the type of lists of it (the name with an `s`).
const ATTRIBUTE_TYPES: [(&str, AttributeType, AttributeType); 7] = [
    ("float", AttributeType::Float, AttributeType::Floats),
    ("int", AttributeType::Int, AttributeType::Ints),
    ("string", AttributeType::String, AttributeType::Strings),
    ("tensor", AttributeType::Tensor, AttributeType::Tensors),
    ("graph", AttributeType::Graph, AttributeType::Graphs),
    ("sparse_tensor", AttributeType::SparseTensor, AttributeType::SparseTensors),
    ("type_proto", AttributeType::TypeProto, AttributeType::TypeProtos),
];

/// Reads a model; `path` is for messages only.
///
/// Tensors keep their values in the typed fields of [`TensorProto`], as `onnx.parser` leaves them.
///
/// # Errors
/// [`Error::Syntax`] with the place, what was expected there and what was found.
pub fn parse(text: &str, path: &Path) -> Result<ModelProto> {
    Parser { text, at: 0, depth: 0 }.model().map_err(|Fault { at, what }| {
        let before = &text[..at];
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line = before.matches('\n').count() + 1;
        Error::Syntax { path: path.to_owned(), line, column: before[line_start..].chars().count() + 1, what }
    })
}

/// An error at a byte of the text.
struct Fault {
    at: usize,
    what: String,
}

type Parse<T> = Result<T, Fault>;

/// Reads from `at` on, always at the start of a character. There is no token stream: what a character means depends on
/// where it stands.
struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

/// An attribute's value, or one element of its list.
enum Value {
    Float(f32),
    Int(i64),
    String(Bytes),
    Tensor(Box<TensorProto>),
    Graph(Box<GraphProto>),
    Type(Box<TypeProto>),
}

impl Value {
    fn kind(&self) -> AttributeType {
        match self {
            Value::Float(_) => AttributeType::Float,
            Value::Int(_) => AttributeType::Int,
            Value::String(_) => AttributeType::String,
            Value::Tensor(_) => AttributeType::Tensor,
            Value::Graph(_) => AttributeType::Graph,
            Value::Type(_) => AttributeType::TypeProto,
        }
    }
}

/// The start of what may be a very long word.
fn clip(ascii: &str) -> &str {
    &ascii[..ascii.len().min(40)]
}

fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn is_special_float(word: &str) -> bool {
    ["inf", "infinity", "nan"].iter().any(|special| word.eq_ignore_ascii_case(special))
}

/// Whether a type may start with this word (`undefined` may, too, but is a name unless one follows).
fn is_type_word(word: &str) -> bool {
    matches!(word, "seq" | "map" | "optional" | "sparse_tensor" | "opaque")
        || DataType::from_name(word).is_some_and(|kind| kind != DataType::Undefined)
}

fn attribute_type_name(kind: AttributeType) -> String {
    let of = |&(name, one, many): &(&str, _, _)| match kind {
        kind if kind == one => Some(name.to_owned()),
        kind if kind == many => Some(format!("{name}s")),
        _ => None,
    };
    ATTRIBUTE_TYPES.iter().find_map(of).unwrap_or_else(|| "undefined".into())
}

// Characters, names and literals.
impl<'a> Parser<'a> {
    /// The next byte after space and comments.
    fn peek(&mut self) -> Option<u8> {
        let bytes = self.text.as_bytes();
        loop {
            match bytes.get(self.at)? {
                b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c => self.at += 1,
                b'#' => self.at = self.text[self.at..].find('\n').map_or(self.text.len(), |n| self.at + n),
                &byte => return Some(byte),
            }
        }
    }

    /// Where the next byte after space and comments is.
    fn start(&mut self) -> usize {
        self.peek();
        self.at
    }

    fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8, expected: &str) -> Parse<()> {
        if self.eat(byte) { Ok(()) } else { Err(self.expected(expected)) }
    }

    fn expected(&mut self, expected: &str) -> Fault {
        let found = match self.peek() {
            None => "the end of the text".to_owned(),
            Some(b'"') => "a string".to_owned(),
            Some(byte) if is_word_byte(byte) => format!("'{}'", clip(self.word_bytes())),
            Some(_) => format!("'{}'", self.text[self.at..].chars().next().unwrap_or_default()),
        };
        Fault { at: self.at, what: format!("expected {expected}, found {found}") }
    }

    /// Letters, digits and underscores from here on, possibly none.
    fn word_bytes(&self) -> &'a str {
        let rest = &self.text[self.at..];
        &rest[..rest.bytes().take_while(|&b| is_word_byte(b)).count()]
    }

    fn peek_word(&mut self) -> Option<&'a str> {
        let first = self.peek()?;
        (is_word_byte(first) && !first.is_ascii_digit()).then(|| self.word_bytes())
    }

    /// An identifier.
    fn word(&mut self) -> Option<&'a str> {
        let word = self.peek_word()?;
        self.at += word.len();
        Some(word)
    }

    /// An identifier or a string.
    fn name(&mut self, expected: &str) -> Parse<String> {
        match self.peek() {
            Some(b'"') => self.string(expected),
            _ => self.word().map(str::to_owned).ok_or_else(|| self.expected(expected)),
        }
    }

    /// The names of a node's inputs or outputs: one may be left out before a comma, and a trailing comma says nothing.
    fn names(&mut self) -> Parse<Vec<String>> {
        let mut names = Vec::new();
        loop {
            match self.peek() {
                Some(b'"') => names.push(self.string("a name")?),
                Some(b',') => names.push(String::new()),
                _ => match self.word() {
                    Some(word) => names.push(word.to_owned()),
                    None => return Ok(names),
                },
            }
            if !self.eat(b',') {
                return Ok(names);
            }
        }
    }

    /// Names with dots between them. Those after a dot may start with a digit, as in the domain `pkg.torch.2.1`.
    fn dotted(&mut self, expected: &str) -> Parse<Vec<String>> {
        let mut parts = vec![self.name(expected)?];
        while self.eat(b'.') {
            if self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
                let word = self.word_bytes();
                self.at += word.len();
                parts.push(word.to_owned());
            } else {
                parts.push(self.name(expected)?);
            }
        }
        Ok(parts)
    }

    fn string(&mut self, expected: &str) -> Parse<String> {
        let open = self.start();
        self.expect(b'"', expected)?;
        let mut string = String::new();
        let mut rest = &self.text[self.at..];
        while let Some(end) = rest.find(['"', '\\']) {
            string.push_str(&rest[..end]);
            let mut after = rest[end..].chars();
            if after.next() == Some('"') {
                self.at = self.text.len() - after.as_str().len();
                return Ok(string);
            }
            string.extend(after.next());
            rest = after.as_str();
        }
        Err(Fault { at: open, what: "expected '\"' at the end of this string, found the end of the text".into() })
    }

    /// A number's text: `-`? then digits with a fraction and an exponent, or inf, infinity or nan in any case.
    fn number(&mut self, expected: &str) -> Parse<&'a str> {
        let start = self.start();
        let rest = &self.text[start..];
        let bytes = rest.as_bytes();
        let digits = |from: usize| from + bytes[from..].iter().take_while(|b| b.is_ascii_digit()).count();
        let unsigned = usize::from(bytes.first() == Some(&b'-'));
        let mut end = digits(unsigned);
        if end > unsigned {
            if bytes.get(end) == Some(&b'.') {
                end = digits(end + 1);
            }
            if let Some(b'e' | b'E') = bytes.get(end) {
                end = digits(end + 1 + usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-'))));
            }
        } else {
            end += bytes[end..].iter().take_while(|&&b| is_word_byte(b)).count();
            if !is_special_float(&rest[unsigned..end]) {
                return Err(self.expected(expected));
            }
        }
        self.at += end;
        Ok(&rest[..end])
    }

    fn int<T: FromStr>(&mut self, expected: &str) -> Parse<T> {
        let at = self.start();
        let text = self.number(expected)?;
        text.parse().map_err(|_| Fault { at, what: format!("expected {expected}, found '{}'", clip(text)) })
    }

    fn real<T: FromStr + Into<f64> + Copy>(&mut self, expected: &str) -> Parse<T> {
        let at = self.start();
        let text = self.number(expected)?;
        let is_digit = |byte: u8| byte.is_ascii_digit();
        match text.parse::<T>() {
            // Digits that round to infinity are an error, the word is not.
            Ok(value) if value.into().is_finite() || !text.bytes().any(is_digit) => Ok(value),
            _ => Err(Fault { at, what: format!("expected {expected}, found '{}'", clip(text)) }),
        }
    }

    /// Items with commas between them, up to `close`.
    fn items<T>(&mut self, close: u8, what: &str, mut item: impl FnMut(&mut Self) -> Parse<T>) -> Parse<Vec<T>> {
        let mut items = Vec::new();
        if self.eat(close) {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if self.eat(close) {
                return Ok(items);
            }
            if !self.eat(b',') {
                return Err(self.expected(&format!("',' or '{}' after {what}", close as char)));
            }
        }
    }

    /// Bounds the recursion: a text that is too deep is refused before the stack ends.
    fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Parse<T>) -> Parse<T> {
        if self.depth == MAX_DEPTH {
            let what = format!("expected at most {MAX_DEPTH} levels of graphs and types, found one more");
            return Err(Fault { at: self.start(), what });
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }
}

// Types, values and tensors.
impl Parser<'_> {
    fn next_is_type(&mut self) -> bool {
        match self.peek_word() {
            Some("undefined") => {
                let start = self.at;
                self.word();
                let name_or_shape_follows = matches!(self.peek(), Some(b'[' | b'"')) || self.peek_word().is_some();
                self.at = start;
                name_or_shape_follows
            }
            Some(word) => is_type_word(word),
            None => false,
        }
    }

    fn elem_type(&mut self) -> Parse<i32> {
        let Some(kind) = self.peek_word().and_then(DataType::from_name) else {
            return Err(self.expected("an element type"));
        };
        self.word();
        Ok(kind as i32)
    }

    fn tensor_type(&mut self) -> Parse<TensorType> {
        let elem_type = self.elem_type()?;
        if !self.eat(b'[') {
            return Ok(TensorType { elem_type, shape: Some(TensorShapeProto::default()) });
        }
        let dim = self.items(b']', "a dimension", |p| {
            let value = match p.peek() {
                _ if p.eat(b'?') => None,
                Some(b'-' | b'0'..=b'9') => Some(DimensionValue::DimValue(p.int("a size")?)),
                _ => Some(DimensionValue::DimParam(p.name("a dimension: a size, a name or '?'")?)),
            };
            Ok(Dimension { value, ..Default::default() })
        })?;
        Ok(TensorType { elem_type, shape: (!dim.is_empty()).then_some(TensorShapeProto { dim }) })
    }

    fn type_proto(&mut self) -> Parse<TypeProto> {
        let value = match self.peek_word() {
            Some(word @ ("seq" | "map" | "optional" | "sparse_tensor" | "opaque")) => {
                self.word();
                self.expect(b'(', "'(' and a type")?;
                let value = self.type_arguments(word)?;
                self.expect(b')', "')' after a type")?;
                value
            }
            _ => TypeValue::Tensor(self.tensor_type()?),
        };
        Ok(TypeProto { value: Some(value), ..Default::default() })
    }

    fn type_arguments(&mut self, word: &str) -> Parse<TypeValue> {
        Ok(match word {
            "seq" => TypeValue::Sequence(ElemType { elem_type: self.inner_type()? }),
            "optional" => TypeValue::Optional(ElemType { elem_type: self.inner_type()? }),
            "sparse_tensor" => TypeValue::SparseTensor(self.tensor_type()?),
            "map" => {
                let key_type = self.elem_type()?;
                self.expect(b',', "',' after the type of the keys")?;
                TypeValue::Map(MapType { key_type, value_type: self.inner_type()? })
            }
            _ if self.peek() == Some(b')') => TypeValue::Opaque(OpaqueType::default()),
            _ => {
                let first = self.dotted("a name")?.join(".");
                TypeValue::Opaque(match self.eat(b',') {
                    true => OpaqueType { domain: first, name: self.name("a name")? },
                    false => OpaqueType { domain: String::new(), name: first },
                })
            }
        })
    }

    fn inner_type(&mut self) -> Parse<Option<Box<TypeProto>>> {
        if self.peek() == Some(b')') {
            return Ok(None);
        }
        self.nested(|p| Ok(Some(Box::new(p.type_proto()?))))
    }

    fn value_info(&mut self) -> Parse<ValueInfoProto> {
        let r#type = if self.next_is_type() { Some(self.type_proto()?) } else { None };
        let expected = if r#type.is_some() { "the name of a value" } else { "a value: a type and a name" };
        Ok(ValueInfoProto { name: self.name(expected)?, r#type, ..Default::default() })
    }

    /// A value and, if it is set to one, its tensor.
    fn value_or_initializer(&mut self) -> Parse<(ValueInfoProto, Option<TensorProto>)> {
        let start = self.start();
        let value = self.value_info()?;
        if !self.eat(b'=') {
            return Ok((value, None));
        }
        let tensor = self.tensor(start, value.r#type.as_ref(), value.name.clone())?;
        Ok((value, Some(tensor)))
    }

    /// The data of a tensor whose type, found at `start`, and name are known.
    fn tensor(&mut self, start: usize, r#type: Option<&TypeProto>, name: String) -> Parse<TensorProto> {
        let fault = |what: &str| Err(Fault { at: start, what: format!("expected {what}") });
        let Some(TypeValue::Tensor(TensorType { elem_type, shape })) = r#type.and_then(|t| t.value.as_ref()) else {
            return fault("an element type and a shape before the name of a tensor");
        };
        let Some(shape) = shape else {
            return fault("the shape of a tensor, found '[]', which is an unknown rank (a scalar has no brackets)");
        };
        let size = |d: &Dimension| match d.value {
            Some(DimensionValue::DimValue(size)) => Some(size).filter(|&size| size >= 0),
            _ => None,
        };
        let Some(dims) = shape.dim.iter().map(size).collect() else {
            return fault("a tensor whose dimensions are all numbers");
        };
        let mut tensor = TensorProto { name, data_type: *elem_type, dims, ..Default::default() };
        if self.eat(b'[') {
            tensor.data_location = DataLocation::External as i32;
            tensor.external_data = self.string_pairs()?;
        } else {
            self.expect(b'{', "'{' and values, or '[' and where they are")?;
            self.values(&mut tensor)?;
        }
        Ok(tensor)
    }

    /// The values of a tensor, after `{`.
    fn values(&mut self, t: &mut TensorProto) -> Parse<()> {
        let kind = DataType::try_from(t.data_type).unwrap_or_default();
        let (after, name) = ("a value", kind.name());
        let a_value = format!("a value of {name}");
        let found = match kind {
            DataType::Float | DataType::Complex64 => {
                t.float_data = self.items(b'}', after, |p| p.real(&a_value))?;
                t.float_data.len()
            }
            DataType::Double | DataType::Complex128 => {
                t.double_data = self.items(b'}', after, |p| p.real(&a_value))?;
                t.double_data.len()
            }
            DataType::Int64 => {
                t.int64_data = self.items(b'}', after, |p| p.int(&a_value))?;
                t.int64_data.len()
            }
            DataType::Uint64 => {
                t.uint64_data = self.items(b'}', after, |p| p.int(&a_value))?;
                t.uint64_data.len()
            }
            DataType::Uint32 => {
                t.uint64_data = self.items(b'}', after, |p| p.int::<u32>(&a_value).map(u64::from))?;
                t.uint64_data.len()
            }
            DataType::String => {
                t.string_data = self.items(b'}', after, |p| p.string("a string").map(Bytes::from))?;
                t.string_data.len()
            }
            _ => {
                let (range, bits) = match kind {
                    DataType::Int8 => (-128..=127, ""),
                    DataType::Uint8 => (0..=255, ""),
                    DataType::Int16 => (-32768..=32767, ""),
                    DataType::Uint16 => (0..=65535, ""),
                    DataType::Float16 | DataType::Bfloat16 => (0..=65535, "the bits of "),
                    _ => (i32::MIN..=i32::MAX, ""),
                };
                let a_value = format!("{bits}{a_value}, an integer from {} to {}", range.start(), range.end());
                t.int32_data = self.items(b'}', after, |p| {
                    let at = p.start();
                    let value = p.int(&a_value)?;
                    let fault = || Fault { at, what: format!("expected {a_value}, found '{value}'") };
                    range.contains(&value).then_some(value).ok_or_else(fault)
                })?;
                t.int32_data.len()
            }
        };
        let each = match kind {
            DataType::Complex64 | DataType::Complex128 => 2,
            // Several elements may share a value.
            DataType::Uint4 | DataType::Int4 | DataType::Float4e2m1 | DataType::Uint2 | DataType::Int2 => return Ok(()),
            DataType::Float6e2m3 | DataType::Float6e3m2 => return Ok(()),
            _ => 1,
        };
        let expected = match t.dims.contains(&0) {
            true => Some(0),
            false => t.dims.iter().try_fold(each, |n: u64, &d| n.checked_mul(d.unsigned_abs())),
        };
        if expected != Some(found as u64) {
            let expected = expected.map_or("more than 2^64".into(), |n| n.to_string());
            let what = format!("expected {expected} value(s) for {name} {:?}, found {found}", t.dims);
            return Err(Fault { at: self.at - 1, what });
        }
        Ok(())
    }

    /// Pairs of strings, after `[`.
    fn string_pairs(&mut self) -> Parse<Vec<StringStringEntryProto>> {
        self.items(b']', "a key and its value", |p| {
            let key = p.string("a string as key")?;
            p.expect(b':', "':' after a key")?;
            Ok(StringStringEntryProto { key, value: p.string("a string as value")? })
        })
    }
}

// Attributes, nodes, graphs and the whole.
impl Parser<'_> {
    fn attributes(&mut self) -> Parse<Vec<AttributeProto>> {
        if !self.eat(b'<') {
            return Ok(Vec::new());
        }
        self.items(b'>', "an attribute", |p| {
            let name = p.name("the name of an attribute")?;
            p.attribute(name)
        })
    }

    /// The rest of an attribute whose name is known.
    fn attribute(&mut self, name: String) -> Parse<AttributeProto> {
        let declared = if self.eat(b':') { self.attribute_type()? } else { AttributeType::Undefined };
        self.expect(b'=', "'=' and the value of an attribute")?;
        let mut a = AttributeProto { name, r#type: declared as i32, ..Default::default() };
        let start = self.start();
        if self.eat(b'@') {
            a.ref_attr_name = self.name("the name of an attribute of the function")?;
        } else if self.eat(b'[') {
            let mut kind = ATTRIBUTE_TYPES.iter().find(|t| t.2 == declared).map_or(declared, |t| t.1);
            let values = self.items(b']', "an element", |p| {
                let value = p.attribute_value(kind)?;
                kind = value.kind();
                Ok(value)
            })?;
            match ATTRIBUTE_TYPES.iter().find(|t| t.1 == kind) {
                Some(&(_, one, many)) if declared != one || !values.is_empty() => a.r#type = many as i32,
                _ => {
                    let what = "expected a type such as ': ints' before '=', as the list is empty".into();
                    return Err(Fault { at: start, what });
                }
            }
            for value in values {
                match value {
                    Value::Float(value) => a.floats.push(value),
                    Value::Int(value) => a.ints.push(value),
                    Value::String(value) => a.strings.push(value),
                    Value::Tensor(value) => a.tensors.push(*value),
                    Value::Graph(value) => a.graphs.push(*value),
                    Value::Type(value) => a.type_protos.push(*value),
                }
            }
        } else {
            let value = self.attribute_value(declared)?;
            a.set_type(value.kind());
            match value {
                Value::Float(value) => a.f = value,
                Value::Int(value) => a.i = value,
                Value::String(value) => a.s = value,
                Value::Tensor(value) => a.t = Some(value),
                Value::Graph(value) => a.g = Some(value),
                Value::Type(value) => a.tp = Some(value),
            }
        }
        Ok(a)
    }

    fn attribute_type(&mut self) -> Parse<AttributeType> {
        let word = self.peek_word().unwrap_or_default();
        let one = ATTRIBUTE_TYPES.iter().find(|t| t.0 == word).map(|t| t.1);
        let many = || ATTRIBUTE_TYPES.iter().find(|t| Some(t.0) == word.strip_suffix('s')).map(|t| t.2);
        let Some(kind) = one.or_else(many) else {
            let names = ATTRIBUTE_TYPES.map(|t| t.0).join(", ");
            return Err(self.expected(&format!("the type of an attribute ({names}, or one of them with an 's')")));
        };
        self.word();
        Ok(kind)
    }

    fn attribute_value(&mut self, expected: AttributeType) -> Parse<Value> {
        let at = self.start();
        let value = self.any_value(expected)?;
        if expected == AttributeType::Undefined || expected == value.kind() {
            return Ok(value);
        }
        let [expected, found] = [expected, value.kind()].map(attribute_type_name);
        Err(Fault { at, what: format!("expected a value of type {expected}, found one of type {found}") })
    }

    fn any_value(&mut self, expected: AttributeType) -> Parse<Value> {
        let start = self.start();
        let graph = expected == AttributeType::Graph;
        if !graph && self.next_is_type() {
            let r#type = self.type_proto()?;
            let tensor = expected == AttributeType::Tensor || matches!(self.peek(), Some(b'{' | b'=' | b'"'));
            if !tensor && self.peek_word().is_none() {
                return Ok(Value::Type(Box::new(r#type)));
            }
            let named = self.peek() == Some(b'"') || self.peek_word().is_some();
            let name = if named { self.name("a name")? } else { String::new() };
            self.eat(b'=');
            return self.tensor(start, Some(&r#type), name).map(Box::new).map(Value::Tensor);
        }
        if !graph && self.peek() == Some(b'"') {
            let string = self.string("a string")?;
            if self.peek() != Some(b'(') {
                return Ok(Value::String(string.into()));
            }
            self.at = start;
        }
        let named = self.peek() == Some(b'"') || self.peek_word().is_some_and(|word| !is_special_float(word));
        if graph || named {
            return self.graph().map(Box::new).map(Value::Graph);
        }
        let text = self.number("the value of an attribute")?;
        self.at = start;
        let is_int = text.bytes().all(|byte| byte == b'-' || byte.is_ascii_digit());
        match is_int && expected != AttributeType::Float {
            true => self.int("a 64-bit integer").map(Value::Int),
            false => self.real("a 32-bit float").map(Value::Float),
        }
    }

    fn node(&mut self) -> Parse<NodeProto> {
        let mut node = NodeProto::default();
        if self.eat(b'[') {
            if self.peek() != Some(b']') {
                node.name = self.name("the name of a node")?;
            }
            self.expect(b']', "']' after the name of a node")?;
        }
        node.output = self.names()?;
        self.expect(b'=', "'=' after the outputs of a node")?;
        let mut path = self.dotted("the name of an operator")?;
        node.op_type = path.pop().unwrap_or_default();
        node.domain = path.join(".");
        if self.eat(b':') {
            node.overload = self.name("the name of an overload")?;
        }
        node.attribute = self.attributes()?;
        self.expect(b'(', "'(' and the inputs of a node")?;
        node.input = self.names()?;
        self.expect(b')', "',' or ')' after an input")?;
        if node.attribute.is_empty() {
            node.attribute = self.attributes()?;
        }
        Ok(node)
    }

    fn nodes(&mut self) -> Parse<Vec<NodeProto>> {
        self.expect(b'{', "'{' before nodes")?;
        let mut nodes = Vec::new();
        while !self.eat(b'}') {
            if self.peek().is_none() {
                return Err(self.expected("a node or '}'"));
            }
            nodes.push(self.node()?);
        }
        Ok(nodes)
    }

    fn arrow(&mut self) -> Parse<()> {
        let arrow = self.eat(b'=') && self.text[self.at..].starts_with('>');
        if !arrow {
            return Err(self.expected("'=>' and outputs"));
        }
        self.at += 1;
        Ok(())
    }

    fn signature(&mut self, what: &str) -> Parse<Vec<ValueInfoProto>> {
        self.expect(b'(', &format!("'(' and {what}"))?;
        self.items(b')', what, Self::value_info)
    }

    fn graph(&mut self) -> Parse<GraphProto> {
        self.nested(|p| {
            let mut graph = GraphProto { name: p.name("the name of a graph")?, ..Default::default() };
            if p.eat(b'(') {
                for (value, tensor) in p.items(b')', "an input", Self::value_or_initializer)? {
                    graph.input.push(value);
                    graph.initializer.extend(tensor);
                }
            }
            p.arrow()?;
            graph.output = p.signature("an output")?;
            if p.eat(b'<') {
                for (value, tensor) in p.items(b'>', "a value or an initializer", Self::value_or_initializer)? {
                    match tensor {
                        Some(tensor) => graph.initializer.push(tensor),
                        None => graph.value_info.push(value),
                    }
                }
            }
            graph.node = p.nodes()?;
            Ok(graph)
        })
    }

    /// The entries of a header, if there is one. `entry` reads a value, or says that it knows no such key.
    fn header(&mut self, keys: &str, mut entry: impl FnMut(&mut Self, &str) -> Parse<bool>) -> Parse<()> {
        if self.eat(b'<') {
            self.items(b'>', "an entry", |p| {
                let at = p.start();
                let Some(key) = p.word() else { return Err(p.expected(keys)) };
                p.expect(b':', "':' after a key")?;
                match entry(p, key)? {
                    true => Ok(()),
                    false => Err(Fault { at, what: format!("expected {keys}, found '{}'", clip(key)) }),
                }
            })?;
        }
        Ok(())
    }

    fn opset_import(&mut self) -> Parse<Vec<OperatorSetIdProto>> {
        self.expect(b'[', "'[' and operator sets, such as \"\" : 17")?;
        self.items(b']', "an operator set", |p| {
            let domain = p.string("a domain as a string")?;
            p.expect(b':', "':' after a domain")?;
            Ok(OperatorSetIdProto { domain, version: p.int("a version")? })
        })
    }

    fn function(&mut self) -> Parse<FunctionProto> {
        let mut f = FunctionProto::default();
        self.header("domain, overload, opset_import or doc_string", |p, key| {
            match key {
                "domain" => f.domain = p.string("a string")?,
                "overload" => f.overload = p.string("a string")?,
                "opset_import" => f.opset_import = p.opset_import()?,
                "doc_string" => f.doc_string = p.string("a string")?,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        f.name = self.name("the name of a function")?;
        if self.eat(b'<') {
            self.items(b'>', "an attribute", |p| {
                let name = p.name("the name of an attribute")?;
                match p.peek() {
                    Some(b':' | b'=') => f.attribute_proto.push(p.attribute(name)?),
                    _ => f.attribute.push(name),
                }
                Ok(())
            })?;
        }
        let inputs = self.signature("an input")?;
        self.arrow()?;
        let outputs = self.signature("an output")?;
        f.input = inputs.iter().map(|value| value.name.clone()).collect();
        f.output = outputs.iter().map(|value| value.name.clone()).collect();
        f.value_info = inputs.into_iter().chain(outputs).filter(|value| value.r#type.is_some()).collect();
        if self.eat(b'<') {
            f.value_info.extend(self.items(b'>', "a value", Self::value_info)?);
        }
        f.node = self.nodes()?;
        Ok(f)
    }

    fn model(&mut self) -> Parse<ModelProto> {
        let mut m = ModelProto::default();
        let keys = "ir_version, opset_import, producer_name, producer_version, domain, model_version, doc_string or \
            metadata_props";
        self.header(keys, |p, key| {
            match key {
                "ir_version" => m.ir_version = p.int("a version")?,
                "opset_import" => m.opset_import = p.opset_import()?,
                "producer_name" => m.producer_name = p.string("a string")?,
                "producer_version" => m.producer_version = p.string("a string")?,
                "domain" => m.domain = p.string("a string")?,
                "model_version" => m.model_version = p.int("a version")?,
                "doc_string" => m.doc_string = p.string("a string")?,
                "metadata_props" => {
                    p.expect(b'[', "'[' and pairs of strings")?;
                    m.metadata_props = p.string_pairs()?;
                }
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        m.graph = Some(self.graph()?);
        while self.peek().is_some() {
            m.functions.push(self.function()?);
        }
        Ok(m)
    }
}

/// Writes a model. [`parse`] and, unless it needs what this module adds, `onnx.parser` make the same of it again.
///
/// Raw data comes back as the same values in typed fields. For want of a syntax, these are not written: documentation
/// and metadata of graphs, nodes and values, metadata of functions, denotations, quantization annotations, sparse
/// initializers and the payload of a NaN. A sparse attribute is written as `...`, which is no value. Bytes of a string
/// that are not UTF-8 become U+FFFD.
pub fn print(model: &ModelProto) -> String {
    let mut printer = Printer { out: String::new(), indent: 0, line: 0 };
    printer.model(model);
    printer.out
}

struct Printer {
    out: String,
    /// Spaces at the start of a line.
    indent: usize,
    /// Where the current line starts, as far as lists know.
    line: usize,
}

fn is_identifier(name: &str) -> bool {
    name.bytes().all(is_word_byte) && name.bytes().next().is_some_and(|first| !first.is_ascii_digit())
}

/// Whether a name is never taken for the start of something else.
fn is_plain(name: &str) -> bool {
    is_identifier(name) && !is_type_word(name) && !is_special_float(name)
}

/// The elements of a tensor's raw data, or its typed ones.
fn elements<'a, const N: usize, R: 'a, T: Copy + From<R> + 'a>(
    raw: &'a [u8],
    read: fn([u8; N]) -> R,
    typed: &'a [T],
) -> impl Iterator<Item = T> + 'a {
    let (chunks, _) = raw.as_chunks();
    chunks.iter().map(move |&chunk| read(chunk).into()).chain(typed.iter().copied())
}

impl Printer {
    fn put(&mut self, text: &str) {
        self.out.push_str(text);
    }

    fn newline(&mut self) {
        self.out.push('\n');
        self.line = self.out.len();
        self.out.extend(std::iter::repeat_n(' ', self.indent));
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            if matches!(c, '"' | '\\') {
                self.out.push('\\');
            }
            self.out.push(c);
        }
        self.out.push('"');
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.string(&String::from_utf8_lossy(bytes));
    }

    fn name(&mut self, name: &str) {
        if is_plain(name) { self.put(name) } else { self.string(name) }
    }

    /// A name where no type or value may stand: `onnx.parser` wants no quotes there.
    fn word(&mut self, name: &str) {
        if is_identifier(name) { self.put(name) } else { self.string(name) }
    }

    /// Words with dots between them.
    fn dotted(&mut self, name: &str) {
        if name.split('.').all(is_identifier) { self.put(name) } else { self.string(name) }
    }

    fn display(&mut self, value: impl fmt::Display) {
        // Writing to a string cannot fail.
        let _ = write!(self.out, "{value}");
    }

    /// The shortest text that reads as the same number, always with a '.', an 'e' or letters.
    fn real(&mut self, value: impl fmt::Debug) {
        let start = self.out.len();
        let _ = write!(self.out, "{value:?}");
        if self.out.ends_with("NaN") {
            self.out.truncate(start);
            self.put("nan");
        }
    }

    /// As short as it gets where the type is known.
    fn short_real(&mut self, value: impl fmt::Debug) {
        self.real(value);
        if self.out.ends_with(".0") {
            self.out.truncate(self.out.len() - 2);
        }
    }

    /// Items with commas between them, on as many lines as they need.
    fn list<T>(&mut self, items: impl IntoIterator<Item = T>, item: impl FnMut(&mut Self, T)) {
        self.rows(usize::MAX, items, item);
    }

    /// Likewise, with a new line before every `row` of them.
    fn rows<T>(&mut self, row: usize, items: impl IntoIterator<Item = T>, mut item: impl FnMut(&mut Self, T)) {
        self.indent += INDENT;
        for (i, value) in items.into_iter().enumerate() {
            self.put(if i == 0 { "" } else { "," });
            let gap = self.out.len();
            if row != usize::MAX && i % row == 0 {
                self.newline();
                item(self, value);
                continue;
            }
            self.put(if i == 0 { "" } else { " " });
            let (text, line) = (self.out.len(), self.line);
            item(self, value);
            // Too long, and did not break its line itself: move it to a new one.
            if i > 0 && self.line == line && self.out.len() - line > WIDTH {
                let moved = self.out.split_off(text);
                self.out.truncate(gap);
                self.newline();
                self.put(&moved);
            }
        }
        self.indent -= INDENT;
    }

    fn elem_type(&mut self, elem_type: i32) {
        self.put(DataType::try_from(elem_type).unwrap_or_default().name());
    }

    fn tensor_type(&mut self, t: &TensorType) {
        self.elem_type(t.elem_type);
        let Some(shape) = &t.shape else { return self.put("[]") };
        for (i, dim) in shape.dim.iter().enumerate() {
            self.put(if i == 0 { "[" } else { ", " });
            match &dim.value {
                Some(DimensionValue::DimValue(size)) => self.display(size),
                Some(DimensionValue::DimParam(name)) => self.word(name),
                None => self.put("?"),
            }
        }
        self.put(if shape.dim.is_empty() { "" } else { "]" });
    }

    fn type_proto(&mut self, t: &TypeProto) {
        let (kind, inner) = match &t.value {
            None => return,
            Some(TypeValue::Tensor(tensor)) => return self.tensor_type(tensor),
            Some(TypeValue::SparseTensor(tensor)) => {
                self.put("sparse_tensor(");
                self.tensor_type(tensor);
                return self.put(")");
            }
            Some(TypeValue::Opaque(opaque)) => {
                self.put("opaque(");
                if !opaque.domain.is_empty() {
                    self.dotted(&opaque.domain);
                    self.put(", ");
                    self.word(&opaque.name);
                } else if !opaque.name.is_empty() {
                    self.dotted(&opaque.name);
                }
                return self.put(")");
            }
            Some(TypeValue::Sequence(sequence)) => ("seq(", &sequence.elem_type),
            Some(TypeValue::Optional(optional)) => ("optional(", &optional.elem_type),
            Some(TypeValue::Map(map)) => {
                self.put("map(");
                self.elem_type(map.key_type);
                (", ", &map.value_type)
            }
        };
        self.put(kind);
        if let Some(inner) = inner {
            self.type_proto(inner);
        }
        self.put(")");
    }

    fn value_info(&mut self, value: &ValueInfoProto) {
        if let Some(r#type) = value.r#type.as_ref().filter(|t| t.value.is_some()) {
            self.type_proto(r#type);
            self.put(" ");
        }
        self.name(&value.name);
    }

    fn string_pair(&mut self, pair: &StringStringEntryProto) {
        self.string(&pair.key);
        self.put(": ");
        self.string(&pair.value);
    }

    fn tensor(&mut self, t: &TensorProto, initializer: bool) {
        self.elem_type(t.data_type);
        for (i, dim) in t.dims.iter().enumerate() {
            self.put(if i == 0 { "[" } else { ", " });
            self.display(dim);
        }
        self.put(if t.dims.is_empty() { "" } else { "]" });
        let external = t.data_location == DataLocation::External as i32;
        if initializer || !t.name.is_empty() {
            self.put(" ");
            self.name(&t.name);
        }
        // Without a name or '=' the brackets would be a shape.
        self.put(if initializer || external || !t.name.is_empty() { " = " } else { " " });
        if external {
            self.put("[");
            self.list(&t.external_data, Self::string_pair);
            return self.put("]");
        }
        self.put("{");
        self.values(t);
        self.put("}");
    }

    fn values(&mut self, t: &TensorProto) {
        let raw: &[u8] = &t.raw_data;
        // A matrix that is not small gets a line for each row.
        let row = match t.dims[..] {
            [.., rows, columns] if rows > 1 && columns > 1 && rows.saturating_mul(columns) > 16 => columns as usize,
            _ => usize::MAX,
        };
        match DataType::try_from(t.data_type).unwrap_or_default() {
            DataType::Float | DataType::Complex64 => {
                self.rows(row, elements(raw, f32::from_le_bytes, &t.float_data), Self::short_real)
            }
            DataType::Double | DataType::Complex128 => {
                self.rows(row, elements(raw, f64::from_le_bytes, &t.double_data), Self::short_real)
            }
            DataType::String => self.list(&t.string_data, |p, s| p.bytes(s)),
            DataType::Int64 => self.rows(row, elements(raw, i64::from_le_bytes, &t.int64_data), Self::display),
            DataType::Uint64 => self.rows(row, elements(raw, u64::from_le_bytes, &t.uint64_data), Self::display),
            DataType::Uint32 => self.rows(row, elements(raw, u32::from_le_bytes, &t.uint64_data), Self::display),
            DataType::Int32 => self.rows(row, elements(raw, i32::from_le_bytes, &t.int32_data), Self::display),
            DataType::Int16 => self.rows(row, elements(raw, i16::from_le_bytes, &t.int32_data), Self::display),
            DataType::Uint16 | DataType::Float16 | DataType::Bfloat16 => {
                self.rows(row, elements(raw, u16::from_le_bytes, &t.int32_data), Self::display)
            }
            DataType::Int8 => self.rows(row, elements(raw, i8::from_le_bytes, &t.int32_data), Self::display),
            _ => self.rows(row, elements(raw, u8::from_le_bytes, &t.int32_data), Self::display),
        }
    }

    /// Says the type only where the value does not.
    fn attribute(&mut self, a: &AttributeProto) {
        let (kind, reference) = (a.r#type(), !a.ref_attr_name.is_empty());
        let told = match kind {
            AttributeType::Undefined => true,
            _ if reference => false,
            AttributeType::Float | AttributeType::Int | AttributeType::String => true,
            AttributeType::Tensor | AttributeType::TypeProto => true,
            AttributeType::Floats => !a.floats.is_empty(),
            AttributeType::Ints => !a.ints.is_empty(),
            AttributeType::Strings => !a.strings.is_empty(),
            AttributeType::Graph => a.g.as_ref().is_some_and(|graph| is_plain(&graph.name)),
            _ => false,
        };
        self.word(&a.name);
        if !told {
            self.put(": ");
            self.put(&attribute_type_name(kind));
        }
        self.put(" = ");
        if reference {
            self.put("@");
            return self.word(&a.ref_attr_name);
        }
        let list = ATTRIBUTE_TYPES.iter().any(|t| t.2 == kind);
        self.put(if list { "[" } else { "" });
        match kind {
            AttributeType::Float => self.real(a.f),
            AttributeType::Int => self.display(a.i),
            AttributeType::String => self.bytes(&a.s),
            AttributeType::Tensor => a.t.iter().for_each(|tensor| self.tensor(tensor, false)),
            AttributeType::Graph => a.g.iter().for_each(|graph| self.graph(graph)),
            AttributeType::TypeProto => a.tp.iter().for_each(|t| self.type_proto(t)),
            AttributeType::Floats => self.list(&a.floats, Self::real),
            AttributeType::Ints => self.list(&a.ints, Self::display),
            AttributeType::Strings => self.list(&a.strings, |p, string| p.bytes(string)),
            AttributeType::Tensors => self.list(&a.tensors, |p, tensor| p.tensor(tensor, false)),
            AttributeType::Graphs => self.list(&a.graphs, Self::graph),
            AttributeType::TypeProtos => self.list(&a.type_protos, Self::type_proto),
            // Neither parser takes this for a value, so that nothing is lost in silence.
            AttributeType::Undefined | AttributeType::SparseTensor | AttributeType::SparseTensors => self.put("..."),
        }
        self.put(if list { "]" } else { "" });
    }

    fn node(&mut self, node: &NodeProto) {
        if !node.name.is_empty() {
            self.put("[");
            self.name(&node.name);
            self.put("] ");
        }
        self.list(&node.output, |p, name| p.name(name));
        self.put(if node.output.is_empty() { "= " } else { " = " });
        if !node.domain.is_empty() {
            self.dotted(&node.domain);
            self.put(".");
        }
        self.word(&node.op_type);
        if !node.overload.is_empty() {
            self.put(":");
            self.word(&node.overload);
        }
        // Graphs are easier to read after the inputs, each on lines of its own.
        let graphs = node.attribute.iter().any(|a| a.g.is_some() || !a.graphs.is_empty());
        if !graphs && !node.attribute.is_empty() {
            self.put(" <");
            self.list(&node.attribute, Self::attribute);
            self.put("> ");
        }
        self.put("(");
        self.list(&node.input, |p, name| p.name(name));
        self.put(")");
        if graphs {
            self.put(" ");
            self.block("<", ">", &node.attribute, Self::attribute);
        }
    }

    /// Items with commas after them, each on lines of its own.
    fn block<T>(
        &mut self,
        open: &str,
        close: &str,
        items: impl IntoIterator<Item = T>,
        mut item: impl FnMut(&mut Self, T),
    ) {
        self.put(open);
        self.indent += INDENT;
        for (i, value) in items.into_iter().enumerate() {
            self.put(if i == 0 { "" } else { "," });
            self.newline();
            item(self, value);
        }
        self.indent -= INDENT;
        self.newline();
        self.put(close);
    }

    fn nodes(&mut self, nodes: &[NodeProto]) {
        self.put(" {");
        self.indent += INDENT;
        for node in nodes {
            self.newline();
            self.node(node);
        }
        self.indent -= INDENT;
        self.newline();
        self.put("}");
    }

    fn graph(&mut self, graph: &GraphProto) {
        self.name(&graph.name);
        self.put(" (");
        self.list(&graph.input, Self::value_info);
        self.put(") => (");
        self.list(&graph.output, Self::value_info);
        self.put(")");
        let tensors = graph.initializer.iter().map(|tensor| (Some(tensor), None));
        let values = graph.value_info.iter().map(|value| (None, Some(value)));
        if !graph.initializer.is_empty() || !graph.value_info.is_empty() {
            self.put(" ");
            self.block("<", ">", tensors.chain(values), |p, (tensor, value)| {
                tensor.into_iter().for_each(|tensor| p.tensor(tensor, true));
                value.into_iter().for_each(|value| p.value_info(value));
            });
        }
        self.nodes(&graph.node);
    }

    /// A key of a header.
    fn key(&mut self, key: &str) {
        self.put(if self.out.ends_with('<') { "" } else { "," });
        self.newline();
        self.put(key);
        self.put(": ");
    }

    fn strings(&mut self, entries: &[(&str, &str)]) {
        for (key, text) in entries.iter().filter(|(_, text)| !text.is_empty()) {
            self.key(key);
            self.string(text);
        }
    }

    fn opset_import(&mut self, sets: &[OperatorSetIdProto]) {
        self.key("opset_import");
        self.put("[");
        self.list(sets, |p, set| {
            p.string(&set.domain);
            p.put(" : ");
            p.display(set.version);
        });
        self.put("]");
    }

    fn function(&mut self, f: &FunctionProto) {
        self.put("<");
        self.indent = INDENT;
        self.strings(&[("domain", &f.domain), ("overload", &f.overload)]);
        self.opset_import(&f.opset_import);
        self.strings(&[("doc_string", &f.doc_string)]);
        self.indent = 0;
        self.newline();
        self.put(">\n");
        self.name(&f.name);
        if !f.attribute.is_empty() || !f.attribute_proto.is_empty() {
            let plain = f.attribute.iter().map(|name| (Some(name), None));
            let valued = f.attribute_proto.iter().map(|attribute| (None, Some(attribute)));
            self.put(" <");
            self.list(plain.chain(valued), |p, (name, attribute)| {
                name.into_iter().for_each(|name| p.name(name));
                attribute.into_iter().for_each(|attribute| p.attribute(attribute));
            });
            self.put(">");
        }
        self.put(" (");
        self.list(&f.input, |p, name| p.name(name));
        self.put(") => (");
        self.list(&f.output, |p, name| p.name(name));
        self.put(")");
        if !f.value_info.is_empty() {
            self.put(" ");
            self.block("<", ">", &f.value_info, Self::value_info);
        }
        self.nodes(&f.node);
        self.put("\n");
    }

    fn model(&mut self, m: &ModelProto) {
        self.put("<");
        self.indent = INDENT;
        self.key("ir_version");
        self.display(m.ir_version);
        self.opset_import(&m.opset_import);
        self.strings(&[("producer_name", &m.producer_name), ("producer_version", &m.producer_version)]);
        self.strings(&[("domain", &m.domain)]);
        if m.model_version != 0 {
            self.key("model_version");
            self.display(m.model_version);
        }
        self.strings(&[("doc_string", &m.doc_string)]);
        if !m.metadata_props.is_empty() {
            self.key("metadata_props");
            self.put("[");
            self.list(&m.metadata_props, Self::string_pair);
            self.put("]");
        }
        self.indent = 0;
        self.newline();
        self.put(">\n");
        m.graph.iter().for_each(|graph| self.graph(graph));
        self.put("\n");
        m.functions.iter().for_each(|function| self.function(function));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use prost::Message;

    /// Everything there is, as `print` writes it.
    const ALL: &str = r#"<
   ir_version: 10,
   opset_import: ["" : 17, "my.domain" : 1],
   producer_name: "a \"quoted\" \\ name",
   producer_version: "1",
   domain: "d",
   model_version: 2,
   doc_string: "two
lines",
   metadata_props: ["key": "value", "": ""]
>
main (float[N, 4] x, bool c, float16[] any, seq(float[?]) s, untyped, "float") => (float[N, "a b", ?] y,
   undefined u) <
   float[2, 3] w = {1, -0, 0.1, inf, -inf, 1e-45},
   float[17, 2] rows = {
      0, 1,
      2, 3,
      4, 5,
      6, 7,
      8, 9,
      10, 11,
      12, 13,
      14, 15,
      16, 17,
      18, 19,
      20, 21,
      22, 23,
      24, 25,
      26, 27,
      28, 29,
      30, 31,
      32, 33},
   double "not an identifier" = {1.7976931348623157e308},
   float16[2] h = {15360, 65535},
   bool[2] b = {1, 0},
   int8[2] i8 = {-128, 127},
   uint64 u64 = {18446744073709551615},
   int64[0, 9] none = {},
   complex64[1] z = {1, 2},
   int4[3] nibbles = {33, 3},
   string[2] strings = {"a\\b", "é\""},
   float[1000000000, 1000000000] elsewhere = ["location": "w.bin", "offset": "4096"],
   map(string, optional(int64)) m,
   sparse_tensor(float[9]) sp,
   opaque(a.b, c) o,
   opaque() oo
> {
   [first] h, "" = MatMul(x, w)
   = my.domain.Sink:over(h)
   y = "pkg.2.1".Kinds <f = 1.0, g = -inf, i = -3, s = "<&>", fs = [1.0, 2.5e-8], is = [1, 2], ss = ["a", ""],
      t = float {1}, named = int64[1] n = {2}, away = float = ["location": "w"], tp = seq(float[]),
      none: ints = [], ts: tensors = [float {1}, int64 {2}], tps: type_protos = [float[1], bool]> (h, "", last)
   z = If(c) <
      then_branch = left () => (float z) <
         float one = {1}
      > {
         z = Identity(one)
      },
      else_branch: graph = "right-hand side" () => (float z) {
         z = Neg(x)
      },
      more: graphs = [g () => () {
         }, h () => () {
         }]
   >
}
<
   domain: "my.domain",
   overload: "over",
   opset_import: ["" : 17],
   doc_string: "a function"
>
Sink <alpha, beta = 2.5> (x, "seq") => (y) <
   float[N] x
> {
   y = LeakyRelu <alpha: float = @alpha, free = @beta> (x)
}
"#;

    fn read(text: &str) -> Result<ModelProto> {
        parse(text, Path::new("m.onnxtxt"))
    }

    /// A graph with one node.
    fn node(text: &str) -> NodeProto {
        read(&format!("g () => () {{ {text} }}")).unwrap().graph.unwrap().node.remove(0)
    }

    #[test]
    fn printing_undoes_parsing() {
        let model = read(ALL).unwrap();
        assert_eq!(print(&model), ALL);
        assert_eq!(ModelProto::decode(model.encode_to_vec().as_slice()).unwrap(), model);
    }

    #[test]
    fn tensors_keep_every_bit() {
        // Steps over all of 2^32 and 2^64, so that every exponent is met.
        let bits32 = (0..20_000u32).map(|i| i.wrapping_mul(0x9e37_79b9));
        let bits64 = (0..20_000u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let f32s: Vec<u8> = bits32.filter(|b| !f32::from_bits(*b).is_nan()).flat_map(u32::to_le_bytes).collect();
        let f64s: Vec<u8> =
            bits64.clone().filter(|b| !f64::from_bits(*b).is_nan()).flat_map(u64::to_le_bytes).collect();
        let any: Vec<u8> = bits64.take(512).flat_map(u64::to_le_bytes).collect();
        for dtype in DType::ALL {
            let bytes: Vec<u8> = match dtype {
                DType::F32 => f32s.clone(),
                DType::F64 => f64s.clone(),
                DType::Bool => any.iter().map(|b| b & 1).collect(),
                _ => any.clone(),
            };
            let dims = [bytes.len() / dtype.size()];
            let tensor = TensorProto::new("t", dtype, &dims, bytes.clone().into()).unwrap();
            let graph = GraphProto { name: "g".into(), initializer: vec![tensor], ..Default::default() };
            let text = print(&ModelProto { graph: Some(graph), ..Default::default() });
            let back = read(&text).unwrap();
            assert!(back.graph.as_ref().unwrap().initializer[0].bytes().unwrap() == bytes, "{dtype}");
            assert!(print(&back) == text, "{dtype}");
        }
        let nan = read("g () => () <float[2] t = {nan, -NaN}> {}").unwrap();
        assert!(nan.graph.as_ref().unwrap().initializer[0].float_data.iter().all(|v| v.is_nan()));
        assert!(print(&nan).contains("float[2] t = {nan, nan}"));
    }

    #[test]
    fn reads_all_that_people_write() {
        let names = |text: &str| node(&format!("= Op({text})")).input;
        assert_eq!(names(""), [""; 0]);
        assert_eq!(names("\"\""), [""]);
        assert_eq!(names(","), [""]);
        assert_eq!(names("x,"), ["x"]);
        assert_eq!(names(",x, # a comment ) \n ,\"y z\""), ["", "x", "", "y z"]);

        let op = node("[\"a b\"] a, b = com . example.Op : v1 (x) <i = 1>");
        assert_eq!((op.name.as_str(), op.domain.as_str(), op.op_type.as_str()), ("a b", "com.example", "Op"));
        assert_eq!((op.overload.as_str(), op.output.len(), op.attribute.len()), ("v1", 2, 1));
        assert_eq!(node("y = pkg.torch.2.1.0.f(x)").domain, "pkg.torch.2.1.0");

        use AttributeType::*;
        for (text, kind) in [
            ("1", Int),
            ("-1", Int),
            ("1.", Float),
            ("1E5", Float),
            ("-Infinity", Float),
            ("NaN", Float),
            ("\"1\"", String),
            ("float {1}", Tensor),
            ("float[1] {1}", Tensor),
            ("float[1] name {1}", Tensor),
            ("float[1] = {1}", Tensor),
            ("float", TypeProto),
            ("nano () => () {}", Graph),
            ("\"q\" () => () {}", Graph),
            ("[1, 2]", Ints),
            ("[1.5, 2]", Floats),
            ("[\"a\"]", Strings),
            ("@outer", Undefined),
        ] {
            assert_eq!(node(&format!("y = Op <a = {text}> ()")).attribute[0].r#type(), kind, "{text}");
        }
        assert_eq!(node("y = Op <a: float = -0> ()").attribute[0].f.to_bits(), (-0.0f32).to_bits());
        assert_eq!(node("y = Op <a: floats = [1, 2]> ()").attribute[0].floats, [1.0, 2.0]);
        assert_eq!(&node("y = Op <a = \"\\n\\\"\\\\\"> ()").attribute[0].s[..], b"n\"\\");

        let old =
            read("g (float[2] x = {1, 2}, float y) => (float z) <float w = {3}, float v> { z = Add(x, y) }").unwrap();
        let graph = old.graph.unwrap();
        assert_eq!((graph.input.len(), graph.initializer.len(), graph.value_info.len()), (2, 2, 1));
        let f = read("g () => () {} f (float[N] x, y) => (seq(float) z) <bool b> {}").unwrap().functions.remove(0);
        assert_eq!((f.input.len(), f.output.len(), f.value_info.len()), (2, 1, 3));
    }

    #[test]
    fn says_where_and_what() {
        // Place, what it must say, and the text, in which \n is a new line.
        let wrong = r#"
1:1 | expected the name of a graph, found the end of the text |
3:3 | or metadata_props, found 'opset' | <\n  ir_version: 8,\n  opset: 1>
1:14 | expected a version, found a string | <ir_version: "8">
1:14 | expected a version, found '9223372036854775808' | <ir_version: 9223372036854775808>
1:12 | expected ',' or ']' after a dimension, found 'x' | g (float[N x) => () {}
1:12 | expected the name of a value, found ')' | g (float[N]) => () {}
1:8 | expected '=>' and outputs, found '(' | g () = () {}
2:3 | expected '=' after the outputs of a node, found 'é' | g () => () {\n  é = Op(x)\n}
1:25 | expected ',' or ')' after an input, found 'y' | g () => () { "é" = Op(x y) }
1:26 | expected the value of an attribute, found '>' | g () => () { y = Op <a = > (x) }
1:26 | expected a type such as ': ints' before '=' | g () => () { y = Op <a = []> (x) }
1:25 | expected the type of an attribute (float, int, | g () => () { y = Op <a: integer = 1> (x) }
1:31 | expected a value of type int, found one of type float | g () => () { y = Op <a: int = 1.5> (x) }
1:30 | expected a value of type int, found one of type float | g () => () { y = Op <a = [1, 1.5]> (x) }
1:26 | expected a 32-bit float, found '1e99' | g () => () { y = Op <a = 1e99> (x) }
1:26 | expected '"' at the end of this string | g () => () { y = Op <a = "b> (x) }
1:23 | expected a node or '}', found the end of the text | g () => () { y = Op(x)
1:13 | found '[]', which is an unknown rank | g () => () <float[] t = {1}> {}
1:13 | expected a tensor whose dimensions are all numbers | g () => () <float[N] t = {1}> {}
1:13 | expected an element type and a shape | g () => () <seq(float) t = {1}> {}
1:26 | expected '{' and values, or '[' and where they are, found '1' | g () => () <float[2] t = 1> {}
1:37 | expected 4 value(s) for float [2, 2], found 3 | g () => () <float[2, 2] t = {1, 2, 3}> {}
1:48 | expected more than 2^64 value(s) | g () => () <float[9999999999, 9999999999] t = {}> {}
1:23 | an integer from -128 to 127, found '128' | g () => () <int8 t = {128}> {}
1:26 | expected the bits of a value of float16, an integer from 0 to 65535 | g () => () <float16 t = {1.5}> {}
1:23 | expected a value of bool, an integer from | g () => () <bool t = {true}> {}
1:15 | expected the name of a function, found '}' | g () => () {} }
"#;
        for line in wrong.trim().lines() {
            let mut parts = line.splitn(3, " |");
            let mut part = || parts.next().expect("three parts").trim().replace("\\n", "\n");
            let (place, what, text) = (part(), part(), part());
            let message = read(&text).expect_err(&text).to_string();
            assert!(
                message.starts_with(&format!("m.onnxtxt:{place}: ")) && message.contains(&what),
                "{text}\n{message}"
            );
        }
    }

    #[test]
    fn damaged_text_is_an_error_and_no_panic() {
        // It is whole after the graph, after the function, and after the new lines that follow them.
        let (graph_end, function_end) = (ALL.rfind("\n<").expect("a function"), ALL.len() - 1);
        for end in (0..ALL.len()).filter(|&end| ALL.is_char_boundary(end)) {
            let whole = [graph_end, graph_end + 1, function_end].contains(&end);
            assert_eq!(read(&ALL[..end]).is_ok(), whole, "{}", &ALL[..end]);
        }
        let mut random = 1u32;
        let mut next = |below: usize| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) as usize % below
        };
        let alphabet: Vec<char> = "<>(){}[],.:=@#\"\\?-+_ \n0189eEinfatxé\u{0}".chars().collect();
        let mut refused = 0;
        for _ in 0..4000 {
            let mut chars: Vec<char> = ALL.chars().collect();
            for _ in 0..1 + next(3) {
                let at = next(chars.len());
                match next(3) {
                    0 => chars[at] = alphabet[next(alphabet.len())],
                    1 => chars.insert(at, alphabet[next(alphabet.len())]),
                    _ => drop(chars.drain(at..(at + 1 + next(30)).min(chars.len()))),
                }
            }
            let text: String = chars.into_iter().collect();
            match read(&text) {
                Ok(model) => drop(print(&model)),
                Err(Error::Syntax { line, column, .. }) => {
                    let found = text.split('\n').nth(line - 1).expect("the line exists");
                    assert!(column <= found.chars().count() + 1);
                    refused += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert!((1000..4000).contains(&refused), "{refused}");
    }

    #[test]
    fn nesting_is_bounded() {
        let types = |n: usize| format!("g ({}float{} x) => () {{}}", "seq(".repeat(n), ")".repeat(n));
        let graphs = |n: usize| {
            let (open, close) = ("g () => () { y = Op <a = ", "> () }");
            format!("{}g () => () {{}}{}", open.repeat(n), close.repeat(n))
        };
        for text in [types(MAX_DEPTH - 1), graphs(MAX_DEPTH - 1)] {
            let model = read(&text).unwrap();
            assert_eq!(read(&print(&model)).unwrap(), model);
            assert_eq!(ModelProto::decode(model.encode_to_vec().as_slice()).unwrap(), model);
        }
        for text in [types(MAX_DEPTH), graphs(MAX_DEPTH), types(100_000), graphs(100_000)] {
            assert!(read(&text).unwrap_err().to_string().contains("expected at most 32 levels of graphs and types"));
        }
    }
}
