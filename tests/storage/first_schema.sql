-- A home as schema 0001 made it, with a row in every table. Never edited.
PRAGMA foreign_keys=OFF;
BEGIN TRANSACTION;
CREATE TABLE adapter_versions (
	domain VARCHAR(64) NOT NULL, 
	version INTEGER NOT NULL, 
	parent INTEGER NOT NULL, 
	path TEXT NOT NULL, 
	base_hash VARCHAR(128) NOT NULL, 
	acceptance FLOAT, 
	created_at FLOAT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	PRIMARY KEY (domain, version), 
	FOREIGN KEY(domain) REFERENCES experts (name)
);
INSERT INTO "adapter_versions" VALUES('sql',1,0,'adapters/sql/v1','sha256:base',NULL,2.0,'retired');
INSERT INTO "adapter_versions" VALUES('sql',2,1,'adapters/sql/v2','sha256:base',0.5,3.0,'live');
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE counters (
	name VARCHAR(64) NOT NULL, 
	value INTEGER NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "counters" VALUES('generation',3);
CREATE TABLE domains (
	name VARCHAR(64) NOT NULL, 
	description TEXT NOT NULL, 
	examples JSON NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (name), 
	FOREIGN KEY(name) REFERENCES experts (name)
);
INSERT INTO "domains" VALUES('sql','all about sql','["SELECT 1", "gr\u00f6\u00dfer \u2265 3"]',1.0);
CREATE TABLE experts (
	name VARCHAR(64) NOT NULL, 
	last_version INTEGER NOT NULL, 
	updates INTEGER NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "experts" VALUES('shared',0,0);
INSERT INTO "experts" VALUES('sql',2,2);
CREATE TABLE meta (
	"key" VARCHAR(128) NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('target','tiny');
CREATE TABLE replay (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	domain VARCHAR(64) NOT NULL, 
	expert VARCHAR(64) NOT NULL, 
	adapter_version INTEGER NOT NULL, 
	target_id TEXT NOT NULL, 
	num_prompt_tokens INTEGER NOT NULL, 
	drafted INTEGER NOT NULL, 
	accepted INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	draw FLOAT NOT NULL, 
	payload BLOB NOT NULL, 
	FOREIGN KEY(domain) REFERENCES experts (name)
);
INSERT INTO "replay" VALUES(1,'sql','sql',1,'tiny',2,4,2,12.5,5.84700485134345582238e-01,X'01000200050000000300000001000000030179CF07000000020000000300000004000000050000000100000003000000090000000400000070110100050000000100000000B000C300B400C0000000FC');
CREATE TABLE request_totals (
	expert VARCHAR(64) NOT NULL, 
	requests INTEGER NOT NULL, 
	tokens INTEGER NOT NULL, 
	steps INTEGER NOT NULL, 
	drafts INTEGER NOT NULL, 
	draft_tokens INTEGER NOT NULL, 
	accepted_tokens INTEGER NOT NULL, 
	seconds FLOAT NOT NULL, 
	first_requests INTEGER NOT NULL, 
	first_draft_tokens INTEGER NOT NULL, 
	first_accepted_tokens INTEGER NOT NULL, 
	PRIMARY KEY (expert)
);
INSERT INTO "request_totals" VALUES('sql',1,8,4,2,10,5,0.5,1,10,5);
CREATE TABLE requests (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	request_id VARCHAR(128) NOT NULL, 
	expert VARCHAR(64) NOT NULL, 
	adapter_version INTEGER NOT NULL, 
	lang VARCHAR(64) NOT NULL, 
	num_prompt_tokens INTEGER NOT NULL, 
	num_tokens INTEGER NOT NULL, 
	num_steps INTEGER NOT NULL, 
	num_drafts INTEGER NOT NULL, 
	num_draft_tokens INTEGER NOT NULL, 
	num_accepted_tokens INTEGER NOT NULL, 
	seconds FLOAT NOT NULL, 
	finish_reason VARCHAR(32) NOT NULL, 
	created_at FLOAT NOT NULL
);
INSERT INTO "requests" VALUES(1,'r','sql',1,'en',3,8,4,2,10,5,0.5,'stop',1.0);
CREATE UNIQUE INDEX one_live_version ON adapter_versions (domain) WHERE state = 'live';
CREATE INDEX replay_by_domain ON replay (domain, id);
CREATE INDEX requests_by_expert ON requests (expert, id);
COMMIT;
