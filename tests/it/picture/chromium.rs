//! A headless Chromium, driven through its DevTools protocol: JSON in WebSocket frames.

use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The longest time for an answer, even on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Browsers run one at a time: several at once are more than a small machine has memory and time for.
static TURN: Mutex<()> = Mutex::new(());

pub struct Chromium {
    process: Child,
    stream: BufReader<TcpStream>,
    folder: PathBuf,
    session: Option<String>,
    next: u64,
    /// The browser's messages that answer no call.
    pub events: Vec<Value>,
    _turn: MutexGuard<'static, ()>,
}

/// The installed browser: `PLIMSOLL_CHROMIUM`, or one of the usual names.
fn program() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os("PLIMSOLL_CHROMIUM") {
        return Some(given.into());
    }
    let folders: Vec<_> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    names.iter().flat_map(|name| folders.iter().map(move |f| f.join(name))).find(|path| path.is_file())
}

/// The browser that listens at a port. One that is not ready yet refuses, or ends the connection.
fn connect(port: &str, path: &str) -> io::Result<BufReader<TcpStream>> {
    let stream = TcpStream::connect(format!("127.0.0.1:{port}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut stream = BufReader::new(stream);
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: cGxpbXNvbGxwbGltc29sbA==\r\n\r\n"
    );
    stream.get_mut().write_all(request.as_bytes())?;
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head)? == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, head));
        }
    }
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    Ok(stream)
}

impl Chromium {
    /// A browser with an empty page. `None`, in words, where there is no browser, unless `PLIMSOLL_REQUIRE_CHROMIUM` is set: then its
    /// absence is a failure.
    pub fn start(name: &str) -> Option<Chromium> {
        Chromium::start_with(name, &["--disable-gpu"])
    }

    /// As [`start`](Self::start), with flags of its own.
    pub fn start_with(name: &str, flags: &[&str]) -> Option<Chromium> {
        let Some(program) = program() else {
            assert!(std::env::var_os("PLIMSOLL_REQUIRE_CHROMIUM").is_none(), "a Chromium is required");
            eprintln!("SKIPPED: no Chromium; PLIMSOLL_CHROMIUM names one");
            return None;
        };
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("chromium-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        // Containers do not allow its sandbox, and the pages are our own.
        let process = Command::new(&program)
            .args(["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--no-first-run"])
            .args(flags)
            .args(["--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"])
            .arg(format!("--user-data-dir={}", folder.display()))
            .arg("about:blank")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", program.display()));
        let start = Instant::now();
        let stream = loop {
            let text = std::fs::read_to_string(folder.join("DevToolsActivePort")).unwrap_or_default();
            let answer = text.split_once('\n').map(|(port, path)| connect(port, path.trim()));
            if let Some(Ok(stream)) = answer {
                break stream;
            }
            assert!(start.elapsed() < PATIENCE, "{} does not start: {answer:?}", program.display());
            std::thread::sleep(Duration::from_millis(50));
        };
        let mut browser = Chromium { process, stream, folder, session: None, next: 0, events: Vec::new(), _turn: turn };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", attach);
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        let size = json!({"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": false});
        browser.call("Emulation.setDeviceMetricsOverride", size);
        Some(browser)
    }

    fn send(&mut self, text: &str) {
        // Clients must mask frames; a mask of zeros changes nothing.
        let mut frame = vec![0x81];
        match text.len() {
            n @ 0..126 => frame.push(0x80 | n as u8),
            n @ 126..65536 => {
                frame.push(0x80 | 126);
                frame.extend((n as u16).to_be_bytes());
            }
            n => {
                frame.push(0x80 | 127);
                frame.extend((n as u64).to_be_bytes());
            }
        }
        frame.extend([0; 4]);
        frame.extend(text.as_bytes());
        self.stream.get_mut().write_all(&frame).expect("the browser reads");
    }

    fn receive(&mut self) -> Value {
        let mut message = Vec::new();
        loop {
            let mut take = |n: usize| {
                let mut bytes = vec![0; n];
                self.stream.read_exact(&mut bytes).expect("the browser answers in time");
                bytes
            };
            let head = take(2);
            let length = match head[1] & 0x7f {
                126 => usize::from(u16::from_be_bytes(take(2).try_into().expect("two bytes"))),
                127 => u64::from_be_bytes(take(8).try_into().expect("eight bytes")) as usize,
                n => usize::from(n),
            };
            let data = take(length);
            if head[0] & 0x0f <= 2 {
                message.extend(data);
                if head[0] & 0x80 != 0 {
                    return serde_json::from_slice(&message).expect("the browser speaks JSON");
                }
            }
        }
    }

    /// Calls a method and waits for its result.
    #[track_caller]
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let id = self.next;
        let mut request = json!({"id": id, "method": method, "params": params});
        if let Some(session) = &self.session {
            request["sessionId"] = json!(session);
        }
        self.send(&request.to_string());
        loop {
            let mut message = self.receive();
            if message["id"] == json!(id) {
                assert!(message.get("error").is_none(), "{method}: {}", message["error"]);
                return message["result"].take();
            }
            self.events.push(message);
        }
    }

    /// The value of an expression in the page.
    #[track_caller]
    pub fn eval(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut found = self.call("Runtime.evaluate", params);
        assert!(found.get("exceptionDetails").is_none(), "{expression}: {}", found["exceptionDetails"]);
        found["result"]["value"].take()
    }

    /// Opens a file and waits until it is loaded.
    #[track_caller]
    pub fn open(&mut self, path: &Path) {
        let url = format!("file://{}", path.display());
        self.call("Page.navigate", json!({"url": url}));
        let start = Instant::now();
        while self.eval("location.href != 'about:blank' && document.readyState") != json!("complete") {
            assert!(start.elapsed() < PATIENCE, "{url} is not loaded");
            std::thread::sleep(Duration::from_millis(20));
        }
        self.settle();
    }

    /// Waits until the requested frame is painted.
    pub fn settle(&mut self) {
        self.eval("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))");
    }

    /// The most bytes that a process of the browser has held, where the system tells.
    pub fn largest_process(&self) -> u64 {
        let of_browser = |path: &Path| {
            let line = std::fs::read(path.join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(&*self.folder.to_string_lossy())
        };
        let held = |path: &Path| {
            let status = std::fs::read_to_string(path.join("status")).ok()?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
        processes.filter(|path| of_browser(path)).filter_map(|path| held(&path)).max().unwrap_or(0) << 10
    }

    /// A mouse event. `more` has the buttons or the turn of the wheel.
    #[track_caller]
    pub fn mouse(&mut self, kind: &str, (x, y): (f64, f64), more: Value) {
        let mut params = json!({"type": kind, "x": x, "y": y});
        for (name, value) in more.as_object().expect("an object") {
            params[name] = value.clone();
        }
        self.call("Input.dispatchMouseEvent", params);
    }

    /// Presses and releases a key. `text` is the text that it types.
    #[track_caller]
    pub fn key(&mut self, key: &str, text: &str) {
        let mut down = json!({"type": "keyDown", "key": key});
        if !text.is_empty() {
            down["text"] = json!(text);
        }
        self.call("Input.dispatchKeyEvent", down);
        self.call("Input.dispatchKeyEvent", json!({"type": "keyUp", "key": key}));
        self.settle();
    }

    /// Errors and warnings so far, and everything that was loaded from elsewhere than files.
    pub fn complaints(&self) -> Vec<String> {
        let complains = |event: &&Value| {
            let params = &event["params"];
            let bad = |level: &Value| matches!(level.as_str(), Some("error" | "warning" | "assert"));
            match event["method"].as_str() {
                Some("Runtime.exceptionThrown") => true,
                Some("Runtime.consoleAPICalled") => bad(&params["type"]),
                Some("Log.entryAdded") => bad(&params["entry"]["level"]),
                Some("Network.requestWillBeSent") => {
                    !params["request"]["url"].as_str().is_some_and(|url| url.starts_with("file:"))
                }
                _ => false,
            }
        };
        self.events.iter().filter(complains).map(Value::to_string).collect()
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        // A browser folder that cannot be removed does no harm.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
