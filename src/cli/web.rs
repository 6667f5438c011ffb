//! `web`: writes the page that plans and runs models in a browser, as one file.

use super::{args, line};
use crate::error::{Error, Result};
use crate::file;
use crate::report::bytes;
use clap::Args;
use serde_json::json;
use std::path::PathBuf;

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
web = page
page
  file text
  bytes int
";

/// The library that a released program holds.
#[cfg(feature = "page")]
const OWN: Option<&[u8]> = Some(include_bytes!(env!("PLIMSOLL_WASM")));
#[cfg(not(feature = "page"))]
const OWN: Option<&[u8]> = None;

const NAME: &str = "plimsoll.wasm";

#[derive(Args)]
pub(super) struct Web {
    /// Write the page to this file.
    #[arg(short = 'o', long, value_name = "FILE", default_value = "plimsoll.html")]
    save: PathBuf,
    /// The library as WebAssembly, which the page holds. Default: the program's own, if it was built with one (the feature `page`), else
    /// plimsoll.wasm beside the program or in the folder above. src/web/build.sh builds it in target.
    #[arg(long, value_name = "FILE")]
    wasm: Option<PathBuf>,
}

impl Web {
    pub(super) fn run(&self, json: bool) -> Result<String> {
        args::outputs([("--save", &*self.save)], self.wasm.clone())?;
        let library = match (&self.wasm, OWN) {
            (None, Some(own)) => own.to_vec(),
            (given, _) => {
                let path = given.clone().map_or_else(beside, Ok)?;
                std::fs::read(&path).map_err(|e| Error::file(&path, "read the library", e))?
            }
        };
        if !library.starts_with(b"\0asm") {
            let what = "--wasm: expected a file of WebAssembly, as src/web/build.sh makes one";
            return Err(Error::usage(what.to_owned()));
        }
        let page = include_str!("../web/page.html")
            .replace("{{worker}}", include_str!("../web/worker.js"))
            .replace("{{js}}", include_str!("../web/page.js"))
            .replace("{{wasm}}", &base64(&packed(&library)?));
        file::write_whole(&self.save, "write the page", |out| out.write_all(page.as_bytes()))?;
        let (path, length) = (self.save.display().to_string(), page.len() as u64);
        Ok(match json {
            true => line(&json!({"file": path, "bytes": length})),
            false => format!("{path}: {}; open it in a browser, it needs no network\n", bytes(length)),
        })
    }
}

/// The library beside the program.
fn beside() -> Result<PathBuf> {
    let program = std::env::current_exe().unwrap_or_default();
    let mut paths = program.ancestors().skip(1).take(2).map(|folder| folder.join(NAME));
    paths.find(|path| path.is_file()).ok_or_else(|| {
        let what = "this program holds no library for pages, and there is none beside it: build it by src/web/build.sh, or name it with --wasm";
        Error::usage(format!("{NAME}: {what}"))
    })
}

/// The library without its names, deflated: the browser inflates it.
fn packed(library: &[u8]) -> Result<Vec<u8>> {
    const HEAD: usize = 8;
    let cut = || Error::usage("--wasm: the file is cut off".to_owned());
    let mut kept = library.get(..HEAD).ok_or_else(cut)?.to_vec();
    let mut at = HEAD;
    while let Some(&kind) = library.get(at) {
        let (mut end, mut length, mut shift) = (at + 1, 0usize, 0);
        loop {
            let byte = *library.get(end).filter(|_| shift < usize::BITS).ok_or_else(cut)?;
            (end, length, shift) = (end + 1, length | usize::from(byte & 127) << shift, shift + 7);
            if byte < 128 {
                break;
            }
        }
        let section = end.checked_add(length).and_then(|end| library.get(at..end)).ok_or_else(cut)?;
        if kind != 0 {
            kept.extend_from_slice(section);
        }
        at += section.len();
    }
    Ok(miniz_oxide::deflate::compress_to_vec(&kept, 9))
}

/// Bytes as text, three in four letters.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for part in bytes.chunks(3) {
        let word = (0..3).fold(0u32, |word, at| word << 8 | u32::from(part.get(at).copied().unwrap_or(0)));
        for at in 0..4 {
            let letter = LETTERS[(word >> (18 - 6 * at)) as usize & 63];
            text.push(if at <= part.len() { letter.into() } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn sections_of_names_are_left_out() {
        let head = *b"\0asm\x01\0\0\0";
        let whole = [&head[..], &[1, 2, 7, 7, 0, 3, 1, 1, 1, 10, 1, 9]].concat();
        let packed = super::packed(&whole).expect("it is whole");
        let kept = miniz_oxide::inflate::decompress_to_vec(&packed).expect("it is deflated");
        assert_eq!(kept, [&head[..], &[1, 2, 7, 7, 10, 1, 9]].concat());
        assert!(super::packed(&whole[..whole.len() - 1]).is_err());
    }

    #[test]
    fn base64_is_the_published_one() {
        let of = |text: &str| super::base64(text.as_bytes());
        assert_eq!(["", "f", "fo", "foo", "foob"].map(of), ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]);
    }
}
